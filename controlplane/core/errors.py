"""Errors that backends raise and the gate and the API handle."""


class BackendDown(RuntimeError):
    """The engine is dead, starting or stopped.

    A retry may help, after `retry_after` seconds where that is known.
    """

    def __init__(self, message: str, *, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class BackendFailed(RuntimeError):
    """The engine failed this one request; `position` is the index of the failed input where known."""

    def __init__(self, message: str, *, position: int | None = None) -> None:
        super().__init__(message)
        self.position = position


class NoMemory(BackendFailed):
    """The device has too little memory for this input, even computed alone."""


class Refused(ValueError):
    """The client asked for something impossible; `param` is the field of the request body."""

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code = code
