"""From a checked configuration to the parts of a run."""

from titan_opd.assemble.common import Common, read_common
from titan_opd.assemble.engines import build_engine, build_stream, what_to_record
from titan_opd.assemble.parts import Parts, assemble, check_world
from titan_opd.assemble.teacher import load_scorer

__all__ = [
    "Common",
    "Parts",
    "assemble",
    "build_engine",
    "build_stream",
    "check_world",
    "load_scorer",
    "read_common",
    "what_to_record",
]
