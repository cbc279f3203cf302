"""Connections that are lost, by the tables of the kernel."""

import pytest

from hvdtrain.flight import connections

HEADER = (
    "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid"
    "  timeout inode"
)
# Of two hosts 15 s after the cut of their network; the first one's interface is down.
CUT = f"""{HEADER}
   0: 0100620A:9DA7 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 700 1 0 100 0 0 10 0
   1: 0100620A:9DA7 0200620A:E616 01 0000002C:00000000 04:00000456 00000000     0        6 701 2 0 1536 4 0 10 -1
   2: 0200620A:E616 0100620A:9DA7 01 0000002C:00000000 01:00000028 00000008     0        0 702 2 0 25600 4 0 1 7
   3: 0200620A:EA0A 0100620A:B68F 01 00000000:00000000 00:00000000 00000000     0        0 703 1 0 20 4 30 10 -1
"""  # noqa: E501
# Data is on the way through a slow network, a full window has been probed once, a
# keepalive timer runs, a connection is being made, and a network loses packets.
HEALTHY = f"""{HEADER}
   0: 0100007F:9DA7 0100007F:E616 01 00040000:00000000 01:00000014 00000000     0        0 701 2 0 20 4 30 10 -1
   1: 0100007F:9DA8 0100007F:E617 01 00040000:00000000 04:00000014 00000000     0        1 702 2 0 20 4 30 10 -1
   2: 0100007F:9DA9 0100007F:E618 01 00000000:00000000 02:00000914 00000000     0        0 703 2 0 20 4 30 10 -1
   3: 0100007F:9DAA 0100007F:E619 02 00000001:00000000 01:00000014 00000006     0        0 704 2 0 1600 0 0 1 7
   4: 0100007F:9DAB 0100007F:E61A 01 00040000:00000000 01:00000014 00000002     0        0 705 2 0 80 4 30 10 -1
"""  # noqa: E501


@pytest.mark.parametrize(("table", "inodes"), [(CUT, [701, 702]), (HEALTHY, [])])
def test_the_table_shows_what_the_other_end_does_not_acknowledge(table, inodes):
    assert list(connections.lost_sockets(table)) == inodes
