"""Which of kube-scheduler's calls are under way: nothing that the cluster reports is applied
meanwhile."""

#: Calls hold up what the cluster reports for at most this long: a caller may send its body slowly.
GIVE_WAY_S = 0.005


class Calls:
    """Counted on the event loop."""

    def __init__(self) -> None:
        self.under_way = 0
        #: Since the start.
        self.begun = 0

    def begin(self) -> None:
        self.under_way += 1
        self.begun += 1

    def end(self) -> None:
        self.under_way -= 1
