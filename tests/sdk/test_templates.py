"""Checklist I as far as this version goes, with the published Python client."""

import pytest
from pandastack import BadRequestError, Client, NotFoundError, Sandbox

from harness.guest import sh
from harness.server import Server, prepared_templates

needs_code_interpreter = pytest.mark.skipif(
    "code-interpreter" not in prepared_templates(), reason="the template code-interpreter was not built"
)


def test_102_the_catalogue(client: Client) -> None:
    templates = {template.name: template for template in client.templates.list()}
    assert "base" in templates
    for template in templates.values():
        assert template.is_global is True
        assert template.cpu > 0 and template.memory_mb > 0 and template.size_bytes > 0
    assert client.templates.get("base").name == "base"
    for unknown in ("x", ".."):
        with pytest.raises(NotFoundError):
            client.templates.get(unknown)


def test_103_a_global_template_can_not_be_deleted(own_server: Server) -> None:
    client = own_server.client()
    with pytest.raises(BadRequestError):
        client.templates.delete("base")
    assert own_server.wire().json("DELETE", "/v1/templates/base").status == 403
    assert client.templates.get("base").name == "base"


@needs_code_interpreter
def test_113_the_default_templates_of_both_clients_create(server: Server, client: Client) -> None:
    with client.sandboxes.create() as python_default:
        assert python_default.template == "code-interpreter"
        assert sh(python_default, "python3 -c 'import numpy, pandas; print(numpy.arange(3).sum())'") == "3\n"
    with client.sandboxes.create(template="ubuntu-24.04") as typescript_default:
        assert sh(typescript_default, "python3 -c 'print(1)'") == "1\n"


def test_base_has_what_agents_reach_for(client: Client) -> None:
    with client.sandboxes.create(template="base") as sandbox:
        for program in ("python3", "bash", "git", "curl", "ps", "find", "ip", "touch", "head", "sha256sum", "setsid"):
            assert sh(sandbox, f"command -v {program}").strip()
        # Not held by what was warmed before the capture.
        assert sandbox.exec("pgrep -x python3").exit_code == 1


def test_base_has_nothing_that_copies_must_not_share(shared: Sandbox) -> None:
    """Keys, ids and seeds on the disk would be the same in every machine, and daemons would put clocks back."""
    for pattern in (
        "/etc/ssh/ssh_host_*",
        "/var/lib/dhcp/*",
        "/var/lib/systemd/random-seed",
        "/var/lib/dbus/machine-id",
    ):
        assert shared.exec(f"ls -d {pattern}").exit_code != 0, pattern
    daemons = ("sshd", "dhclient", "systemd", "chronyd", "ntpd", "systemd-timesyncd", "systemd-networkd")
    assert [name for name in daemons if shared.exec(f"pgrep -x {name}").exit_code == 0] == []
