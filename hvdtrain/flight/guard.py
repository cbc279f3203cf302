"""The guard: a process beside each rank that observes the rank from outside.

A rank that is blocked in MPI, in TensorFlow, or by a thread that holds the GIL runs no
Python. A rank that was killed runs nothing. The guard reads the rank's ring, its state
in /proc, and the stacks that `faulthandler` writes on SIGQUIT. It makes a roll call
when the rank waits in a collective for longer than the limit, takes many times the
usual time for a step, or received SIGQUIT from a person. It answers the roll calls of
other guards. When the rank ends without Python's exit, it says why. A rank that is
stopped for long is killed: the others wait for it, under MPI without limit.
"""

import contextlib
import dataclasses
import json
import os
import pathlib
import select
import signal
import sys
import time

from hvdtrain import processes
from hvdtrain.flight import answer as answers
from hvdtrain.flight import conclusion, connections, deaths, descendants, ring, verdict
from hvdtrain.flight.answer import Answer, Member
from hvdtrain.flight.limits import Wait
from hvdtrain.flight.shared_directory import SharedDirectory
from hvdtrain.flight.slow_start import SlowStart
from hvdtrain.flight.stacks import read_stacks, without_receiver
from hvdtrain.flight.step_durations import StepDurations
from hvdtrain.flight.task import Task
from hvdtrain.interruption import SIGNALS, launcher_signal

# A process that signal N has ended is reported with exit code 128 + N.
_OF_A_SIGNAL = 128
_STDIN, _STDERR = 0, 2
_ENDED = "was killed by its guard, since the job could not continue"
# A signal to the whole job must not end this process before the rank has ended.
_IGNORED = (
    *(signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGPIPE),
    *(signal.SIGUSR1, signal.SIGUSR2),
)


class Guard:
    """Watches the parent process until it ends."""

    def __init__(self, task: Task) -> None:
        self._task = task
        self._member = task.member
        self._shared = SharedDirectory(pathlib.Path(task.directory))
        self._kills = deaths.OutOfMemoryKills()
        self._orphans = descendants.Orphans(self._member.pid)
        self._limits = task.limits
        self._steps = StepDurations(task.limits.check_seconds)
        self._period = task.limits.period_seconds
        self._wait = Wait()
        self._start = SlowStart()
        # Seconds in the present collective when its end was last examined.
        self._examined = 0.0
        self._commands = ""
        self._stack_text = ""
        self._stopped_periods = 0
        self._called_for: float | None = None
        # Whether the last roll call of this process was for a wait, and has text.
        self._has_concluded = False
        self._answered = ""
        # Whether the rank has not written the stacks that a roll call asked for.
        self._awaits_stacks = False
        # Why this process has killed the rank, and whether the rank is the cause.
        self._killed = ""
        self._is_cause = True
        # The wait status of a rank that ends; 0 if it is not known.
        self._status = 0
        # Where the rank is about to end by Python's exit; else None.
        self._exit_code: int | None = None
        # Whether the other ranks depend on this one.
        self._is_in_job = task.member.size > 1
        # Whether `hvd.init` has returned once.
        self._has_joined = False
        # Whether the pipe from the rank has ended.
        self._is_cut = False

    def run(self) -> None:
        """Watch until the rank ends or leaves."""
        with contextlib.suppress(OSError):
            self._shared.add(self._member)
        while self._exit_code is None and os.getppid() == self._member.pid:
            self._read(self._period)
            self._check_stopped()
            self._check_replaced()
            self._check_progress()
            self._check_wait()
            self._answer_call()
            if not self._killed and (text := self._shared.requested_end(self._member)):
                self._kill_for(text)
            self._kills.renew()
            if not deaths.is_fatal(self._stack_text):
                # The rank has moved on before the next roll call.
                self._stack_text = ""
        # What it wrote before it ended.
        self._read(0.0)
        if self._exit_code is None and self._is_stopped():
            self._exit_code = _OF_A_SIGNAL + signal.SIGTERM
        if self._exit_code is None:
            self._report_death()
        elif self._leaves_records():
            self._keep_records("left", f"has ended with exit code {self._exit_code}")
        else:
            self._shared.remove(self._member)
            self._note_end()
        with contextlib.suppress(OSError):
            os.unlink(self._member.ring)
        self._orphans.end()

    def _read(self, timeout_seconds: float) -> None:
        """Read what the rank has sent."""
        sources = [_STDIN, self._task.stacks]
        ready = select.select(sources, [], [], timeout_seconds)[0]
        if _STDIN in ready:
            # First: the launcher reaps a rank that ends.
            self._status = self._status or processes.read_wait_status(self._member.pid)
        if self._task.stacks in ready:
            text = read_stacks(self._task.stacks)
            if self._awaits_stacks and not deaths.is_fatal(text):
                # The stacks of an earlier roll call, which has ended.
                text = ""
            self._awaits_stacks = False
            # Not replaced at the end of the pipe, which follows a fatal error.
            self._stack_text += text
            if text and not deaths.is_fatal(text):
                self._make_roll_call()
        if _STDIN in ready and not self._read_commands():
            self._is_cut = True
            # The kernel closes the files of a process before its end.
            deaths.wait_for_parent(self._member.pid, timeout_seconds=timeout_seconds)

    def _read_commands(self) -> bool:
        data = os.read(_STDIN, 1 << 16).decode()
        *lines, self._commands = (self._commands + data).split("\n")
        for line in lines:
            command, _, value = line.partition(" ")
            if command == "leave":
                # The first is explicit; another follows when Python exits.
                if self._exit_code is None:
                    self._exit_code = int(value)
            elif command == "rank":
                rank, size = map(int, value.split())
                self._join(dataclasses.replace(self._member, rank=rank, size=size))
            elif command == "end":
                self._keep_records("done", "has ended its script")
            elif command == "shutdown":
                self._is_in_job = False
            elif command == "directory":
                self._move(SharedDirectory(pathlib.Path(json.loads(value))))
        return bool(data)

    def _join(self, member: Member) -> None:
        self._member = member
        self._is_in_job = member.size > 1
        if self._has_joined:
            # The job continues without the ranks that it has lost.
            self._shared.remove_lost()
        self._has_joined = True
        with contextlib.suppress(OSError):
            self._shared.add(member)

    def _move(self, shared: SharedDirectory) -> None:
        """Use a directory that ranks of other hosts may see, if this one does."""
        if not shared.directory.parent.is_dir():
            return
        with contextlib.suppress(OSError):
            shared.add(self._member)
            # The same one where a process trains twice in a directory.
            if shared != self._shared:
                self._shared.remove(self._member)
                self._shared = shared

    def _check_stopped(self) -> None:
        # Count periods instead of seconds: a scheduler that suspends all processes
        # suspends this one, too. The state of a debugger is another one.
        is_stopped = processes.read_state(self._member.pid) == "T"
        self._stopped_periods = self._stopped_periods + 1 if is_stopped else 0
        limit = self._limits.stop_seconds
        if self._killed or not limit or not is_stopped:
            return
        if self._stopped_periods * self._period >= limit:
            self._kill_lost(f"was stopped, as by SIGSTOP, for {limit:g} s")

    def _check_replaced(self) -> None:
        """Kill another program in the process of the rank, which has lost the job.

        `exec` closes the pipe and resets the handlers of signals.
        """
        pid = self._member.pid
        is_cut = self._is_cut and self._is_in_job
        is_alive = is_cut and processes.read_state(pid) in ("R", "S", "D")
        if is_alive and not answers.handles(pid, signal.SIGQUIT):
            program = answers.command(pid)
            self._kill_lost(f"has replaced its program by '{program}' (exec)")

    def _kill_lost(self, cause: str) -> None:
        name = f"rank {self._member.rank} on {self._member.host}"
        _print(f"{name}: {cause}, and is killed, since the other ranks wait for it.\n")
        self._kill(f"{cause}, and its guard killed it")

    def _kill(self, cause: str, *, is_cause: bool = True) -> None:
        self._killed, self._is_cause = cause, is_cause
        self._is_in_job = False
        # A roll call takes seconds, after which the PID may be of another process.
        if os.getppid() == self._member.pid:
            os.kill(self._member.pid, signal.SIGKILL)

    def _check_progress(self) -> None:
        moment = ring.read_moment(self._member.ring)
        self._wait.renew(moment.entered if moment else None)
        if moment and self._member.rank == 0 and self._is_in_job:
            _print(self._start.line(self._member.ring, moment))
        if not moment or not self._limits.check_seconds:
            return
        now = time.monotonic()
        since = moment.entered if moment.entered else self._steps.slow(moment, now)
        if self._has_concluded and moment.entered not in (None, self._called_for):
            # The job goes on: a later failure has another cause.
            self._has_concluded = False
            self._shared.remove_conclusion()
        if since is None or since == self._called_for:
            return
        waited = now - since
        if waited >= self._limits.check_seconds and not self._is_ending(waited):
            self._called_for = since
            self._make_roll_call(waited)

    def _is_ending(self, waited: float) -> bool:
        """Return whether a rank has failed, and the launcher may still end the others.

        The last line of the job's output is then the one that names the cause.
        """
        return 0 < waited < self._limits.failed_seconds and self._shared.has_failed()

    def _check_wait(self) -> None:
        """End the job if the rank waits beyond its limit, or for what cannot come."""
        records = ring.read(self._member.ring) if self._wait.seconds else None
        if self._killed or not records or not records.in_flight:
            self._examined = 0.0
            return
        waited, operation = self._wait.seconds, records.in_flight.operation
        limit_seconds, limit = self._limits.end(operation)
        is_over = waited >= limit_seconds
        if is_over and connections.has_lost(self._member.pid):
            if (given := self._look()).in_flight:
                text = f"{conclusion.describe_cut(given)} {limit}"
                self._end_job(self._member, text, is_program_error=False)
        elif waited >= self._limits.examination(operation, self._examined):
            self._examined = waited
            answered, found = self._call() or [], None
            if waited >= self._limits.deadlock_seconds > 0:
                found = verdict.find(answered, seconds=self._limits.deadlock_seconds)
            if is_over and not found:
                answered = answered or [self._look()]
                found = verdict.find_failed(answered, records.in_flight, limit)
            if found:
                self._end_job(found.member or self._member, found.text)

    def _end_job(
        self, member: Member, text: str, *, is_program_error: bool = True
    ) -> None:
        """Kill the process of a member, after which the launcher ends the others."""
        is_first = self._shared.request_end(member, text)
        if is_first:
            self._shared.write_conclusion(text)
            _print(f"{text}\n")
        # Also where the guard of the member has not killed it.
        if member == self._member or not is_first:
            self._kill_for(text if is_program_error else "")

    def _kill_for(self, program_error: str) -> None:
        """Kill the rank, since the job cannot continue."""
        if program_error and self._task.reason is not None:
            os.write(self._task.reason, program_error.encode(errors="replace"))
        self._kill(_ENDED, is_cause=False)

    def _make_roll_call(self, waited: float = 0.0) -> None:
        """Make a roll call, unless one is open, and print what it shows."""
        given = self._call()
        if not given:
            return
        if self._is_ending(waited):
            self._called_for = None
            return
        text = conclusion.conclude(given)
        if waited:
            self._has_concluded = True
            self._shared.write_conclusion(text)
        _print(f"{text}\n{self._write_stacks(given)}")

    def _call(self) -> list[Answer] | None:
        """Return the answers of a roll call; None if another one is open."""
        try:
            call = self._shared.start_roll_call()
        except OSError:
            # Without files: what this process sees of its own rank.
            return [self._look()]
        if not call:
            return None
        try:
            self._answer(call)
            return self._shared.wait_for_answers(call)
        finally:
            self._shared.end_roll_call()

    def _write_stacks(self, given: list[Answer]) -> str:
        """Write the stacks to a file of the model_dir, or return the suspects'."""
        if str(self._shared.directory) != self._task.directory:
            with contextlib.suppress(OSError):
                step = max((answer.step for answer in given), default=0)
                text = conclusion.stacks_text(given)
                return f"Stacks of all ranks: {self._shared.write_stacks(step, text)}\n"
        return conclusion.suspect_stack(given, asked=self._member.rank)

    def _answer_call(self) -> None:
        call = self._shared.current_roll_call()
        if call and call != self._answered:
            self._answer(call)
            # Do not make a second roll call for the same wait.
            moment = ring.read_moment(self._member.ring)
            if moment and moment.entered:
                self._called_for = moment.entered
            self._examined = self._wait.seconds

    def _answer(self, call: str) -> None:
        self._answered = call
        self._shared.write_answer(call, self._look())

    def _look(self) -> Answer:
        """Return where the rank is."""
        state, text = "running", self._stack_text
        if processes.read_state(self._member.pid) == "T":
            state = "stopped"
        elif not text and not answers.handles(self._member.pid, signal.SIGQUIT):
            # Its default action would end the rank.
            state = "silent"
        elif not text:
            with contextlib.suppress(ProcessLookupError):
                answers.request_stacks(self._member.pid, thread=self._task.thread)
            text = without_receiver(read_stacks(self._task.stacks))
            state = "running" if text else "silent"
            self._awaits_stacks = not text
        self._stack_text = ""
        return answers.observe(self._member, state=state, stack_text=text)

    def _report_death(self) -> None:
        # Before the search for the cause, which takes a second: other ranks fail now.
        is_first = not self._shared.has_failed()
        self._keep_records("ended", "has ended")
        cause = self._killed or deaths.cause(
            self._member.pid,
            fatal_error=self._stack_text,
            kills=self._kills,
            status=self._status,
        )
        given = self._keep_records("ended", cause)
        if not is_first or not self._is_cause:
            return
        text = conclusion.conclude([given])
        self._shared.write_conclusion(text)
        stack = f"{self._stack_text.rstrip()}\n" if self._stack_text else ""
        if not self._killed:
            _print(f"{stack}{text}\nRecords: {self._shared.directory}\n")

    def _is_stopped(self) -> bool:
        """Return whether the launcher has ended the rank, and names a signal."""
        is_cause = self._killed or deaths.is_fatal(self._stack_text)
        is_signaled = os.WIFSIGNALED(self._status)
        # 0: not known. SIGKILL may be of the out-of-memory killer.
        number = os.WTERMSIG(self._status) if is_signaled else 0
        return bool(launcher_signal()) and not is_cause and number in (0, *SIGNALS)

    def _leaves_records(self) -> bool:
        """Return whether a rank that leaves has taken part in a job that fails.

        A signal of the launcher ends the ranks after the one that has failed.
        """
        records = ring.read(self._member.ring)
        is_failure = 0 < (self._exit_code or 0) < _OF_A_SIGNAL
        return bool(
            records and records.number and (is_failure or self._shared.has_failed())
        )

    def _note_end(self) -> None:
        """Keep that the rank has ended, for ranks that go on and fail by it."""
        if self._shared.members():
            self._keep_records("done", "has ended its script")
            # They may have ended meanwhile.
            self._shared.remove(self._member, keeps_answer=True)

    def _keep_records(self, state: str, cause: str) -> Answer:
        given = answers.observe(
            self._member, state=state, cause=cause, stack_text=self._stack_text
        )
        self._shared.write_answer("", given)
        return given


def _print(text: str) -> None:
    with contextlib.suppress(OSError):
        os.write(_STDERR, text.encode(errors="replace"))


def main() -> None:
    """Guard the parent process."""
    for number in _IGNORED:
        signal.signal(number, signal.SIG_IGN)
    Guard(Task.from_text(sys.argv[1])).run()
