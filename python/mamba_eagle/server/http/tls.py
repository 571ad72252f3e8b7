"""HTTPS, for servers without a proxy in front of them."""

import ssl

from mamba_eagle.config import ConfigError, ServerConfig


def tls_context(config: ServerConfig) -> ssl.SSLContext | None:
    """None for plain HTTP.

    Raises: ConfigError for a certificate or key that cannot be used.
    """
    if not config.ssl_certfile:
        if config.ssl_keyfile:
            raise ConfigError([f"--ssl-keyfile {config.ssl_keyfile} needs --ssl-certfile"])
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    flags = f"--ssl-certfile {config.ssl_certfile}"
    if config.ssl_keyfile:
        flags += f" --ssl-keyfile {config.ssl_keyfile}"

    def no_password() -> str:
        raise ConfigError([f"{flags}: the key has a password; give one without"])

    try:
        context.load_cert_chain(config.ssl_certfile, config.ssl_keyfile or None, no_password)
    except OSError as error:  # SSLError as well
        reason = error.strerror or str(error) or "not a certificate with its private key"
        raise ConfigError([f"{flags}: {reason}"]) from None
    return context
