"""What `horovodrun --mpi` forwards of the output of mpirun."""

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
