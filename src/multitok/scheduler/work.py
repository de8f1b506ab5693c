"""OutstandingWork: how many tokens a rank still has to work on, for whoever chooses ranks."""

from __future__ import annotations

from multitok.scheduler.request import ScheduledRequest

# What a request is expected to make before any has ended, and how many ends that is averaged over.
_FIRST_EXPECTATION = 256
_ENDS = 16


class OutstandingWork:
    """Prompt ids that have to be read, and output ids that are expected of requests that are not over.

    A request counts with its prompt until its first output, and with its expected output until its end, so that this
    costs nothing per token.

    Attributes
    ----------
    taken : int
        Requests received, whatever became of them.
    tokens : int
        The sum.
    """

    def __init__(self) -> None:
        self.taken = 0
        self.tokens = 0
        self._expected_output = float(_FIRST_EXPECTATION)

    @property
    def expected_output(self) -> int:
        """Output ids that a request makes, as the last ones did."""
        return round(self._expected_output)

    def add(self, request: ScheduledRequest) -> None:
        """Count a request."""
        request.unread = request.prompt_tokens
        most = request.token_limit - request.prompt_tokens
        request.expected_output = min(most, self.expected_output)
        self.tokens += request.unread + request.expected_output

    def begun(self, request: ScheduledRequest) -> None:
        """Count the prompt of a request no more: it has its first output."""
        self.tokens -= request.unread
        request.unread = 0

    def end(self, request: ScheduledRequest) -> None:
        """Count a request no more."""
        self.tokens -= request.unread + request.expected_output
        request.unread = request.expected_output = 0

    def learn(self, output_ids: int) -> None:
        """Take into account how many ids a request has made that came to its own end."""
        self._expected_output += (output_ids - self._expected_output) / _ENDS
