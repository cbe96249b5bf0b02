"""The script that checks kernels on a GPU: its cases, small, in the interpreter, and what it says of a wrong kernel."""

import platform
import sys

import pytest
import torch

from kvkeep.kernels import check

CPU = torch.device("cpu")
HAS_WHEEL = sys.platform == "linux" and platform.machine() in ("x86_64", "aarch64")
needs_triton = pytest.mark.skipif(not HAS_WHEEL, reason="Triton has no wheels for this platform")


def small(dtype=torch.bfloat16):
    return [
        check.decode_case(CPU, dtype, (2, 1, 3, 70, 20)),
        check.decode_case(CPU, dtype, (3, 2, 2, 40, 16), masked=True),
        check.decode_case(CPU, dtype, (1, 1, 4, 9, 16), statistics=False),
        check.replace_case(CPU, dtype, (3, 2, 12, 5), steps=6),
        check.label_case(CPU, dtype, (1, 2, 60, 16), {"backend": "rows", "precision": "bfloat16"}),
        check.topk_case(CPU, 4, 100, 5),
    ]


@needs_triton
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_small_cases_agree(dtype):
    for found in check.check(small(dtype), turns=0):
        assert found.agrees, check.line(found)
        assert "agrees" in check.line(found)
        found.case.kernel()
        found.case.reference()


@needs_triton
@pytest.mark.parametrize("wrong", ["output", "probabilities", "nan"])
def test_a_wrong_kernel_is_found(monkeypatch, wrong):
    from kvkeep.kernels import triton_decode

    right = triton_decode.decode_attention_triton

    def off(*given):
        output, probabilities = right(*given)
        output[0, 0, 0, 0] += {"output": 0.2, "probabilities": 0, "nan": torch.nan}[wrong]
        probabilities[0, 0, 0, 0] += 0.001 if wrong == "probabilities" else 0
        return output, probabilities

    monkeypatch.setattr(triton_decode, "decode_attention_triton", off)
    (found,) = check.check([check.decode_case(CPU, torch.bfloat16, (2, 1, 3, 70, 20))], turns=0)
    assert not found.agrees
    assert "DIFFERS" in check.line(found)


@needs_triton
def test_a_wrong_replacement_is_found(monkeypatch):
    from kvkeep.kernels import triton_place

    right = triton_place.replace_lowest_triton

    def newest_first(keys, values, positions, priority, *rest):
        right(keys, values, positions, priority + positions.neg() / 1000, *rest)

    monkeypatch.setattr(triton_place, "replace_lowest_triton", newest_first)
    (found,) = check.check([check.replace_case(CPU, torch.float32, (3, 2, 40, 5), steps=6)], turns=0)
    assert not found.agrees


def test_without_a_gpu_there_is_one_sentence(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert check.main([]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err == f"error: kernels are checked on a GPU, and torch {torch.__version__} sees none\n"


def test_without_triton_there_is_one_sentence(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(check, "has_triton", lambda: False)
    assert check.main([]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_too_few_turns_are_refused(capsys):
    assert check.main(["--turns", "4"]) == 2
    assert capsys.readouterr().err == "error: a median of 4 turns says little: take at least 5\n"


@needs_triton
@pytest.mark.parametrize(("wrong", "code", "last"), [(0.0, 0, "all agree"), (1.0, 1, "1 differ")])
def test_the_table_and_its_exit_code(monkeypatch, capsys, wrong, code, last):
    """Everything of `main` but the GPU and its clock."""
    case = check.topk_case(CPU, 2, 64, 5)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "A GPU")
    monkeypatch.setattr(check, "cases", lambda device: [case._replace(error=lambda: case.error() + wrong)])
    monkeypatch.setattr(check, "_in_turns", lambda jobs, turns: [(1.0, 2.0), (3.0, 5.0)])
    monkeypatch.setattr(check, "has_triton", lambda: True)
    assert check.main([]) == code
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("A GPU, torch")
    assert lines[-1] == last
    assert "rows 2, length 64, levels 5" in lines[-2]
    assert "3.000 / 5.000" in lines[-2]
    assert "2.50" in lines[-2]
