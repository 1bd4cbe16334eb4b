"""New."""


class BackendDown(RuntimeError):
    """The engine is not there: dead, starting or stopped. Trying again later may help; after so many seconds,
    where one knows."""

    def __init__(self, message: str, *, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class BackendFailed(RuntimeError):
    """The engine is there but failed this one request, at that one of its inputs, where one knows."""

    def __init__(self, message: str, *, position: int | None = None) -> None:
        super().__init__(message)
        self.position = position


class NoMemory(BackendFailed):
    """The device has none for this input, with nothing computed beside it."""


class Refused(ValueError):
    """The caller asked for what cannot be done. `param` names the field, as in the request body."""

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code = code
