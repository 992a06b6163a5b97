"""Stand-ins for Ray: actors are threads of this process, each with another thread for its concurrency group."""

from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from types import SimpleNamespace

from numflow.errors import NumflowError


class RayError(Exception):
    """Any error of Ray."""


class RayTaskError(RayError):
    """An error raised by a method of an actor."""

    def __init__(self, cause):
        super().__init__(str(cause))
        self.cause = cause


class Method:
    """A method of an actor; `remote` calls it on the actor's thread, or on the thread of a concurrency group."""

    def __init__(self, call, threads, group=None):
        self._call, self._threads, self._group = call, threads, group

    def options(self, concurrency_group=None):
        return Method(self._call, self._threads, concurrency_group)

    def remote(self, *args):
        return self._threads[self._group].submit(self._safe, *args)

    def _safe(self, *args):
        try:
            return self._call(*args)
        except NumflowError as error:
            raise RayTaskError(error) from error


class Actor:
    """An object with threads of its own."""

    def __init__(self, kind, groups, args):
        self._threads = {group: ThreadPoolExecutor(1) for group in (None, *groups)}
        self._made = self._threads[None].submit(kind, *args)

    def __getattr__(self, name):
        return Method(lambda *args: getattr(self._made.result(), name)(*args), self._threads)

    def _kill(self):
        made = self._made.result()
        if made.program is not None:
            made.program.close()
        for thread in self._threads.values():
            thread.shutdown()


class StandInRay:
    """The parts of the module ray that RayProgram uses."""

    exceptions = SimpleNamespace(RayError=RayError, RayTaskError=RayTaskError)

    def __init__(self, cpus=8):
        self.cpus = cpus
        self.util = SimpleNamespace(
            placement_group=lambda bundles, strategy: SimpleNamespace(wait=lambda seconds: True),
            remove_placement_group=lambda placed: None,
            scheduling_strategies=SimpleNamespace(PlacementGroupSchedulingStrategy=lambda *args, **options: None))

    def nodes(self):
        return [{"Alive": True, "Resources": {"CPU": self.cpus}}]

    @staticmethod
    def remote(concurrency_groups):
        def decorated(kind):
            return SimpleNamespace(options=lambda **options: SimpleNamespace(
                remote=lambda *args: Actor(kind, concurrency_groups, args)))
        return decorated

    @staticmethod
    def wait(answers, num_returns=1, timeout=None):
        wait_for = FIRST_COMPLETED if num_returns == 1 else "ALL_COMPLETED"
        wait(answers, timeout, wait_for)
        done = [answer for answer in answers if answer.done()][:num_returns]
        return done, [answer for answer in answers if answer not in done]

    def get(self, answers, timeout=None):
        if isinstance(answers, Future):
            return answers.result(timeout)
        return [self.get(answer, timeout) for answer in answers]

    @staticmethod
    def kill(actor):
        actor._kill()
