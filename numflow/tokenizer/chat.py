"""Chat templates: Jinja in a sandbox, with the names that published templates rely on."""

from typing import Any

from numflow.errors import TokenizerError


def render(template: str, **variables: Any) -> str:
    from jinja2.exceptions import TemplateError
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True,
                                                extensions=["jinja2.ext.loopcontrols"])
    try:
        return environment.from_string(template).render(**variables)
    except TemplateError as error:
        raise TokenizerError(f"chat template: {error}") from None
