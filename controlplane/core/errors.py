"""Errors that backends raise and the gate and the API handle."""


class BackendDown(RuntimeError):
    """The engine is dead, starting or stopped.

    A retry may help, after `retry_after` seconds where that is known; not if it `is_permanent`, since the
    engine is not restarted.
    """

    def __init__(self, message: str, *, retry_after: float | None = None, is_permanent: bool = False) -> None:
        super().__init__(message)
        self.retry_after = retry_after
        self.is_permanent = is_permanent


class WorkerDied(BackendDown):
    """The embedding worker died with this request, and another one that repeated it alone did, too."""


class BackendFailed(RuntimeError):
    """The engine failed this one request.

    `position` is the index of the failed input where known, and `field` the request's field that holds it.
    """

    def __init__(self, message: str, *, position: int | None = None) -> None:
        super().__init__(message)
        self.position = position
        self.field = "input"


class NoMemory(BackendFailed):
    """The device has too little memory for this input, even computed alone."""


class Refused(ValueError):
    """The client asked for something impossible; `param` is the field of the request body."""

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code = code
