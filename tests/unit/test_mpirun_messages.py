"""What `horovodrun --mpi` forwards of the output of mpirun."""

import pytest
from horovod.runner import mpi_run

# The last line of rank 1 has no end when rank 0 goes on.
TAGGED = (
    b"[1,0]<stdout>:one\n[1,1]<stdout>:two\n[1,0]<stdout>:\r 1%[1,0]<stdout>:\r 2%\n"
    b"[1,10]<stdout>:ten\n[1,0]<stdout>:\xe9\xff [1/2] [y/n]\n"
    b"[1,1]<stdout>:three[1,0]<stdout>:four\n[1,0]<stdout>:five[1,"
)
UNTAGGED = (
    b"one\n[1,1]<stdout>:two\n\r 1%\r 2%\n"
    b"[1,10]<stdout>:ten\n\xe9\xff [1/2] [y/n]\n"
    b"[1,1]<stdout>:three[1,0]<stdout>:four\nfive[1,"
)


def test_rank_0_has_no_tags_wherever_the_output_is_cut():
    for cut in range(len(TAGGED)):
        pieces = [TAGGED[:cut], TAGGED[cut:]]
        assert b"".join(mpi_run._without_tags_of_rank_0(pieces)) == UNTAGGED, cut
    pieces = [TAGGED[i : i + 1] for i in range(len(TAGGED))]
    assert b"".join(mpi_run._without_tags_of_rank_0(pieces)) == UNTAGGED


def test_a_prompt_is_forwarded_at_once():
    for prompt in (b"[y/n] ", b"In [1]: ", b"[12/50]"):
        assert next(mpi_run._without_tags_of_rank_0([prompt])) == prompt


RULE = "-" * 74 + "\n"
ABORTED = (
    f"{RULE}Primary job  terminated normally, but 1 process returned\n"
    f"a non-zero exit code. Per user-direction, the job has been aborted.\n{RULE}"
)
EXITED = (
    f"{RULE}mpirun detected that one or more processes exited with non-zero status, "
    "thus causing\nthe job to be terminated. The first process to do so was:\n\n"
    f"  Process name: [[26410,1],1]\n  Exit code:    3\n{RULE}"
)
KILLED = (
    f"{RULE}mpirun noticed that process rank 1 with PID 0 on node vm exited on "
    f"signal 9 (Killed).\n{RULE}"
)
LEFT = (
    f"{RULE}mpirun has exited due to process rank 1 with PID 0 on\nnode vm exiting "
    'improperly. There are three reasons this could occur:\n\n1. "init"\n\nYou can '
    f"avoid this message by specifying -quiet on the mpirun command line.\n{RULE}"
)


@pytest.mark.parametrize(
    ("messages", "line"),
    [
        ((ABORTED, EXITED), "rank 1 on here: exit code 3."),
        ((ABORTED, KILLED), "rank 1 on vm: exit code 137 (SIGKILL)."),
        ((LEFT,), "rank 1 on vm: exit code 0 without MPI_Finalize."),
    ],
)
def test_a_failure_is_one_line(messages, line):
    error = "[1,1]<stderr>:an error\n"
    text = "[1,0]<stderr>:50%" + error.join([*messages, ""])
    data, failures = text.encode(), []
    # mpirun writes each message at once: it is read whole, or cut in its body.
    pieces = [data[:17], data[17:200], data[200:]]
    forwarded = b"".join(mpi_run._without_failures(pieces, failures)).decode()
    assert forwarded == "[1,0]<stderr>:50%" + error * len(messages)
    described = mpi_run._describe_failure(b"".join(failures), "here")
    assert described == f"the first rank that failed is {line}"


def test_other_messages_of_mpirun_are_forwarded():
    ruled = f"{RULE}There are not enough slots available in the system\n{RULE}"
    nested = ABORTED.replace("\n", "\n[1,0]<stderr>:")
    unfinished = ABORTED[:-20]
    for text in (ruled, nested, unfinished, RULE):
        failures = []
        pieces = [text.encode()]
        assert b"".join(mpi_run._without_failures(pieces, failures)) == text.encode()
        assert not failures
    assert mpi_run._describe_failure(b"", "here") is None
    # Of several hosts mpirun does not name the one of a rank that exits.
    described = mpi_run._describe_failure(EXITED.encode(), "")
    assert described == "the first rank that failed is rank 1: exit code 3."
