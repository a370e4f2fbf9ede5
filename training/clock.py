"""How fast a run is."""

import time


class Clock:
    """Tokens per second since the last lap, validation left out."""

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        self.started, self.tokens = time.perf_counter(), 0

    def count(self, tokens: int) -> None:
        self.tokens += tokens

    def lap(self) -> dict[str, float]:
        speed = self.tokens / max(time.perf_counter() - self.started, 1e-9)
        self.restart()
        return {"train/tokens_per_second": speed}
