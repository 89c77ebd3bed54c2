"""What a run can do without."""

import logging
from collections.abc import Callable

_logger = logging.getLogger(__name__)


class Attempts:
    """Runs actions until one fails; the failure is said once, and never stops the run.

    Args:
        name: Of what is attempted, for the message.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._has_failed = False

    def __call__(self, action: Callable[[], None]) -> None:
        """Run `action`, unless one has failed before."""
        if self._has_failed:
            return
        # services raise errors of many libraries (network, files, formats), and none is worth a training run
        try:
            action()
        except Exception as error:
            self._has_failed = True
            _logger.warning(
                "%s failed and is off for the rest of the run; training goes on, and metrics.jsonl has every value "
                "(%s: %s)",
                self._name,
                type(error).__name__,
                error,
            )
            _logger.debug("where %s failed", self._name, exc_info=True)
