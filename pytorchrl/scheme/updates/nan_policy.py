"""Count updates that are skipped because of non-finite gradients, and raise an error after too many in a row."""

from __future__ import annotations

from collections.abc import Sequence

from pytorchrl.errors import NonFiniteUpdateError
from pytorchrl.support.terminal import get_logger

# Number of updates in a row that may be skipped. One more skipped update raises an error: skipped updates do not change
# parameters, so the cause would probably persist.
_MAX_SKIPPED_IN_A_ROW = 5
# Number of causes that an error message lists. Each cause names the file of its batch; the first causes are listed,
# because `keep_bad_batches` saves only the first bad batches of each worker.
_MAX_FAULTS_SHOWN = 3

logger = get_logger(__name__)


class NanPolicy:
    """Counts consecutive updates that were skipped because the mean gradient was not finite.

    This class is not thread-safe.
    """

    def __init__(self) -> None:
        self._faults: list[str] = []  # causes of the latest consecutive skipped updates
        self._num_in_a_row = 0

    def made(self) -> None:
        """Record that an update was made."""
        self._num_in_a_row = 0

    def skipped(self, faults: Sequence[str], version: int, is_first: bool) -> None:
        """Record that an update was skipped.

        Args:
            faults: Descriptions of the non-finite values, with the workers that found them; empty if only the mean
                gradient is not finite.
            version: Version of the parameters, which did not change.
            is_first: Whether this is the first skipped update of the run, for which a warning is logged.

        Raises:
            NonFiniteUpdateError: More than five updates in a row were skipped.
        """
        if not self._num_in_a_row:
            self._faults = []
        self._faults += faults or ["the mean of finite gradients overflows"]
        self._num_in_a_row += 1
        more = len(self._faults) - _MAX_FAULTS_SHOWN
        shown = "; ".join(self._faults[:_MAX_FAULTS_SHOWN]) + (f"; and {more} more" if more > 0 else "")
        if is_first:
            logger.warning("an update was skipped: %s; metrics count skipped updates as updates_skipped_nan", shown)
        if self._num_in_a_row > _MAX_SKIPPED_IN_A_ROW:
            raise NonFiniteUpdateError(
                f"{self._num_in_a_row} updates in a row could not be made, because a loss or gradient was not finite: "
                f"{shown}. The parameters are still those of version {version}. Look for extreme values in "
                "observations, rewards and the loss; lower lr or max_grad_norm, or set normalize_obs and "
                "normalize_reward")
