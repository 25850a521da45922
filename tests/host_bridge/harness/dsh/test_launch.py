"""What DSH is started with."""

import json
import sys

import pytest

from host_bridge.errors import HarnessError
from host_bridge.harness.dsh.launch import (
    CHILD_PROVIDER,
    DshSettings,
    build_environment,
    build_patch,
    find_command,
    installed_version,
)
from host_bridge.harness.port import Route
from kernel_ext.wire.codes import ErrorCode


def settings(tmp_path, **more):
    route = Route(provider="deepseek-official", model="deepseek-v4-flash")
    return DshSettings(
        home=tmp_path / "home", workspace=tmp_path, default_route=route, **more
    )


def test_only_chosen_variables_are_passed_on(tmp_path):
    environ = {
        "PATH": "/bin",
        "HOME": "/h/me",
        "LANG": "C.UTF-8",
        "OPENAI_API_KEY": "k-1",
        "AWS_SECRET_ACCESS_KEY": "x",
        "PYTHONPATH": "/x",
        "DSH_TELEMETRY_MODE": "FULL",
        "DEEPSEEK_BASE_URL": "http://elsewhere",
    }

    built = build_environment(settings(tmp_path), {"RLM_BRIDGE_TOKEN": "t"}, environ)

    assert built == {
        "PATH": "/bin",
        "HOME": "/h/me",
        "LANG": "C.UTF-8",
        "RLM_BRIDGE_TOKEN": "t",
        "DSH_HOME": str(tmp_path / "home"),
        "TMPDIR": str(tmp_path / "home" / "tmp"),
        "TEMP": str(tmp_path / "home" / "tmp"),
        "TMP": str(tmp_path / "home" / "tmp"),
        "DSH_TELEMETRY_MODE": "DISABLED",
        "NO_PROXY": "127.0.0.1,localhost,::1",
        "no_proxy": "127.0.0.1,localhost,::1",
    }


def test_proxies_are_passed_on_and_loopback_is_added_to_their_exceptions(tmp_path):
    environ = {
        "https_proxy": "http://proxy:3128",
        "NO_PROXY": "a.example, localhost",
        "no_proxy": "b.example",
    }

    built = build_environment(settings(tmp_path), {}, environ)

    assert built["https_proxy"] == "http://proxy:3128"
    assert built["NO_PROXY"] == "a.example,localhost,b.example,127.0.0.1,::1"
    assert built["no_proxy"] == built["NO_PROXY"]


def test_the_server_and_the_permission_mode_are_told_by_environment(tmp_path):
    chosen = settings(
        tmp_path, base_url="http://127.0.0.1:1", permission_mode="read-only"
    )

    built = build_environment(chosen, {}, {})

    assert built["DEEPSEEK_BASE_URL"] == "http://127.0.0.1:1"
    assert built["DSH_PERMISSION_MODE"] == "read-only"


def test_the_patch_turns_uploads_off_and_brings_plugin_and_provider(tmp_path):
    extra = {"id": "llm-pi-ai", "config": {"providers": {}}}

    rows = json.loads(build_patch(settings(tmp_path, extra_patch_rows=[extra])))

    off = {row["id"] for row in rows if row.get("disabled") is True}
    assert off == {"session-log-deepseek", "plugin-package-inventory-deepseek"}
    assert extra in rows
    inserted = {row["id"]: row for row in rows[-1]["insert"]}
    spawn = inserted["rlm-kernel-spawn"]["config"]
    assert spawn == {"providerName": CHILD_PROVIDER}
    assert inserted["rlm-kernel-bridge"]["config"] == {"provider": CHILD_PROVIDER}


def test_no_credential_is_in_the_patch(tmp_path):
    chosen = settings(tmp_path, credentials=b"refs:\n  KEY: sk-secret-value\n")

    assert b"sk-secret-value" not in build_patch(chosen)


def test_settings_do_not_show_the_credential(tmp_path):
    chosen = settings(tmp_path, credentials=b"refs:\n  KEY: a-secret-value\n")

    assert "a-secret-value" not in repr(chosen)


def test_a_missing_wheel_is_said_with_the_remedy(monkeypatch):
    monkeypatch.setitem(sys.modules, "deepseek_harness_runtime", None)
    with pytest.raises(HarnessError) as refused:
        find_command()

    assert refused.value.code is ErrorCode.HARNESS_UNAVAILABLE
    assert refused.value.next_step == 'pip install "rlm-kernel[dsh]"'


def test_a_platform_without_a_runtime_is_said(monkeypatch):
    pytest.importorskip("deepseek_harness_runtime")
    monkeypatch.setattr("platform.machine", lambda: "riscv64")
    with pytest.raises(HarnessError) as refused:
        find_command()

    assert refused.value.code is ErrorCode.HARNESS_UNAVAILABLE
    assert "riscv64" not in str(refused.value)


def test_the_version_is_for_people(monkeypatch):
    monkeypatch.setattr(
        "host_bridge.harness.dsh.launch._DISTRIBUTION", "no-such-distribution"
    )

    assert installed_version() == "DeepSeek Harness (not installed)"
