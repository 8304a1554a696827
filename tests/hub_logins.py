"""Whose a token is, at the stand-in Hub, and how a browser gets one: OAuth with a code, OAuth on a device."""

from __future__ import annotations

import base64
import hashlib
from urllib.parse import parse_qs, quote, urlsplit


class Logins:
    """Of the handler: `server` is the Hub."""

    def _take_login(self, path: str, token: str | None, body: bytes) -> bool:
        """:returns: whether it was one."""
        if path == "/api/whoami-v2":
            self._whoami(token)
        elif path in ("/oauth/device", "/oauth/token"):
            form = {name: values[0] for name, values in parse_qs(body.decode()).items()}
            is_code = form.get("grant_type") == "authorization_code"
            answer = self._device if path == "/oauth/device" else self._code_token if is_code else self._device_token
            answer(form)
        elif path == "/oauth/authorize":
            self._authorize({name: values[0] for name, values in parse_qs(urlsplit(self.path).query).items()})
        elif path == "/oauth/userinfo":
            self._userinfo(token)
        else:
            return False
        return True

    def _whoami(self, token: str | None) -> None:
        hub = self.server
        if token in hub.expired:
            message = 'User Access Token "mine" is expired'
            return self._say({"error": message}, 401, {"X-Error-Message": message})
        if token not in hub.tokens:
            message = "Invalid credentials in Authorization header"
            return self._say({"error": message}, 401, {"X-Error-Message": message})
        name = hub.tokens[token]
        orgs = [{"type": "org", "name": org, "roleInOrg": "read"} for org in hub.orgs.get(name, [])]
        if hub.hides_orgs and token.startswith("hf_oauth_"):
            orgs = []
        auth = {"type": "access_token", "accessToken": hub.rights[token]} if token in hub.rights else {}
        self._say({"type": "user", "id": hub.ids.get(name, f"id-{name}"), "name": name, "orgs": orgs, "auth": auth})

    def _userinfo(self, token: str | None) -> None:
        name = self.server.tokens.get(token or "")
        if name is None or not token.startswith("hf_oauth_"):
            return self._say({"error": "no"}, 401)
        orgs = [{"sub": org, "name": org.title(), "preferred_username": org} for org in self.server.orgs.get(name, [])]
        self._say({"sub": f"id-{name}", "preferred_username": name, "orgs": orgs})

    def _authorize(self, query: dict[str, str]) -> None:
        """The person agrees at once."""
        app = self.server.app
        if app is None or query["client_id"] != app.client_id or query["code_challenge_method"] != "S256":
            return self._say({"error": "invalid_client"}, 400)
        code = f"secret-code-{len(app.codes)}"
        app.codes[code] = query
        back = f"{query['redirect_uri']}?code={code}&state={quote(query['state'])}"
        self._say({}, 302, {"Location": back})

    def _code_token(self, form: dict[str, str]) -> None:
        app = self.server.app
        begun = app.codes.pop(form["code"], None) if app else None
        digest = hashlib.sha256(form["code_verifier"].encode()).digest()
        challenge = base64.urlsafe_b64encode(digest).decode().rstrip("=")
        if begun is None or begun["code_challenge"] != challenge or begun["redirect_uri"] != form["redirect_uri"]:
            return self._say({"error": "invalid_grant"}, 400)
        token = self.server.oauth_token(app.person, app.client_id, app.scope)
        self._say({"access_token": token, "token_type": "bearer", "expires_in": 28800, "scope": app.scope})

    def _device(self, form: dict[str, str]) -> None:
        device = self.server.device
        device.clients.append(form["client_id"])
        link = f"{self.server.url}/oauth/device/verify"
        answer = {"device_code": "secret-device-code", "user_code": "52AT-FLYZ", "verification_uri": link}
        answer["verification_uri_complete"] = f"{link}?user_code=52AT-FLYZ"
        self._say(answer | {"expires_in": device.expires_in, "interval": device.interval})

    def _device_token(self, form: dict[str, str]) -> None:
        device = self.server.device
        device.polls += 1
        if form.get("device_code") != "secret-device-code" or form.get("client_id") != device.clients[-1]:
            return self._say({"error": "invalid_grant"}, 400)
        if device.polls <= device.pending:
            return self._say({"error": "authorization_pending"}, 400)
        if device.answer != "granted":
            return self._say({"error": device.answer}, 400)
        scope = {} if device.scope is None else {"scope": device.scope}
        self._say({"access_token": device.token, "token_type": "bearer", "expires_in": 2592000, **scope})
