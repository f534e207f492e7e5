"""Plausible mistakes in the schedule, which the property test has to notice."""

from __future__ import annotations

from titan_opd.schedule import Conductor, ScheduleRules
from titan_opd.schedule.pool import Stage


class CountsTrainersVersion(Conductor):
    """Admits by the trainer's version, while the engine still writes with an older one."""

    def _admission_version(self, engine_version):
        return self.version


class OldestFirstOnly(ScheduleRules):
    """Takes the earliest deadlines among the finished samples, and does not look at what it leaves behind."""

    def may_leave(self, left_counts, step):
        return True


class StartsAgainAnywhere(ScheduleRules):
    """Lets a lost sample start again wherever its number is admitted, also when its deadline there is past."""

    def has_room(self, open_counts, engine_version, next_step):
        return True


class TakesExpiredResults(Conductor):
    """Takes the answer of a lease that has expired, while the sample is to be started again already."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self._expired = {}

    def worker_lost(self, worker):
        for known in self.workers:
            if known.name == worker:
                self._expired.update(known.leases)
        super().worker_lost(worker)

    def rollout_done(self, worker, lease_id, answer, now):
        lease = self._expired.pop(lease_id, None)
        entry = next((e for e in self.pool if lease is not None and e.number == lease.number), None)
        if entry is None or entry.stage is not Stage.UNSTARTED:
            return super().rollout_done(worker, lease_id, answer, now)
        self.pool.written(entry, answer)
        return True


class ReusesLeaseNames(Conductor):
    """Gives out the same lease names after a restart, so that results of before fit leases of now."""

    def __init__(self, rules, stream, *, lease_seconds, incarnation):
        super().__init__(rules, stream, lease_seconds=lease_seconds, incarnation="0")


class ForgetsReturnedSamples(Conductor):
    """Does not write into the cut which samples were still being written."""

    def snapshot(self):
        return {**super().snapshot(), "anew": [], "restarted": []}
