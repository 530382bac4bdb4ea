"""hypothesis, which only the strategies need: imported here, or asked for."""

try:
    from hypothesis import strategies as strategies
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "the strategies of yafsdp_fn.testing are hypothesis strategies, and hypothesis "
        "is not installed. Install it: pip install 'yafsdp_fn[test]'. "
        "yafsdp_fn.testing.assert_agrees works without it."
    ) from error
