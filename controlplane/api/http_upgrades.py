"""Serves requests that ask for another protocol as any others (RFC 9110, section 7.8).

Java's HttpClient asks for HTTP/2 (`upgrade: h2c`) with its first request. The parser takes what follows the
headers of such a request for the other protocol: a body would be lost, or be parsed as the next request.
"""

import sys
from typing import Any

from httptools import HttpParserUpgrade, HttpRequestParser
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from controlplane.api.http_protocol import BoundedHttpProtocol


class UpgradeIgnoringProtocol(BoundedHttpProtocol):
    """One connection. The headers of a request with `upgrade` are parsed again, without it."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._received = b""

    def data_received(self, data: bytes) -> None:
        """Parses the bytes."""
        self._received = data
        super().data_received(data)
        self._received = b""

    def on_headers_complete(self) -> None:
        """Starts the request unless its headers are to be parsed again."""
        if not self._asks_for_upgrade():
            super().on_headers_complete()

    def on_message_complete(self) -> None:
        """Ends the body unless the headers are to be parsed again."""
        if not self._asks_for_upgrade():
            super().on_message_complete()

    def _asks_for_upgrade(self) -> bool:
        """Whether the parser stops after these headers because of one that can be left out."""
        return self.parser.should_upgrade() and any(name == b"upgrade" for name, _ in self.headers)

    def _unsupported_upgrade_warning(self) -> None:
        """Called by uvicorn while it handles the parser's exception, which has the place where it stopped."""
        stopped = sys.exception()
        if not isinstance(stopped, HttpParserUpgrade) or not self._asks_for_upgrade():
            return
        version = self.parser.get_http_version().encode()
        line = b"%b %b HTTP/%b" % (self.parser.get_method(), self.url, version)
        kept = [b"%b: %b" % header for header in self.headers if header[0] != b"upgrade"]
        self._received = b"\r\n".join([line, *kept, b"", self._received[stopped.args[0] :]])
        self.parser = HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
        HttpToolsProtocol.data_received(self, self._received)
