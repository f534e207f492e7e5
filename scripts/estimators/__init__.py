"""The parts of scripts/study_estimators.py."""
