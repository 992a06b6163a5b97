"""The device string: valid forms, and errors for others."""

import re

import pytest

from numflow.errors import DeviceError
from numflow.partition.cut.devices import PlacedDevice, parse_devices


@pytest.mark.parametrize(("text", "strategy", "groups"), [
    ("0", "single", [["0"]]),
    ("cpu", "single", [["cpu"]]),
    ("0;1", "by layer", [["0"], ["1"]]),
    ("0&1", "by tensor", [["0", "1"]]),
    ("0&1;2&3", "hybrid", [["0", "1"], ["2", "3"]]),
    (" 0 | 1 , 2 ", "hybrid", [["0", "1"], ["2"]]),
    ("cpu;0", "by layer", [["cpu"], ["0"]]),
    ("CPU;10&2", "hybrid", [["cpu"], ["10", "2"]]),
])
def test_groups(text, strategy, groups):
    devices = parse_devices(text)
    assert [[device.name for device in group] for group in devices.groups] == groups
    assert devices.strategy == strategy
    assert parse_devices(str(devices)) == devices
    assert len(devices) == sum(map(len, groups))


def test_shares():
    devices = parse_devices("0*2;1&3 * .5")
    assert list(devices) == [PlacedDevice("0", 2), PlacedDevice("1"), PlacedDevice("3", 0.5)]
    assert devices.group_shares == (2, 1.5)
    assert str(devices) == "0*2;1&3*0.5"
    for text in ("0*1000000;1*0.000001", "0*1.234567&1"):
        assert str(parse_devices(text)) == text


@pytest.mark.parametrize(("text", "message"), [
    ("", "position 1: expected a device: a number or 'cpu', found the end"),
    ("0;", "position 3: expected a device: a number or 'cpu', found the end"),
    (";0", "position 1: expected a device: a number or 'cpu', found ';0'"),
    ("0;;1", "position 3: expected a device: a number or 'cpu', found ';1'"),
    ("0 1", "position 3: expected ';', '&' or the end, found '1'"),
    ("0&gpu", "position 3: expected a device: a number or 'cpu', found 'gpu'"),
    ("0&1;0", "position 5: expected a device that was not named before; 0 is there already, found '0'"),
    ("1;01", "position 3: expected a device that was not named before; 1 is there already, found '01'"),
    ("0*;1", "position 3: expected a share: a number 0.000001 .. 1000000, found ';1'"),
    ("0*0;1", "position 3: expected a share: a number 0.000001 .. 1000000, found '0;1'"),
    ("0*-1;1", "position 3: expected a share: a number 0.000001 .. 1000000, found '-1;1'"),
    (f"0*{'9' * 400};1", "position 3: expected a share: a number 0.000001 .. 1000000, found '99999999'"),
    ("cpu&cpu", "position 5: expected a device that was not named before; cpu is there already, found 'cpu'"),
    ("0**2", "position 3: expected a share: a number 0.000001 .. 1000000, found '*2'"),
    ("0*2*3", "position 4: expected ';', '&' or the end, found '*3'"),
    ("0.5", "position 1: expected a device: a number or 'cpu', found '0.5'"),
    ("0;-1", "position 3: expected a device: a number or 'cpu', found '-1'"),
    ("0&1$", "position 4: expected ';', '&' or the end, found '$'"),
])
def test_what_is_wrong_and_where(text, message):
    with pytest.raises(DeviceError, match=re.escape(message)):
        parse_devices(text)


def test_no_text():
    with pytest.raises(DeviceError, match="should be text such as '0&1;2&3', is 3"):
        parse_devices(3)
