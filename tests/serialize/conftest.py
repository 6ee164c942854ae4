import pytest
from hypothesis import settings
from serialize_helpers import slow_codec

from telegrad.serialize.tensor_layout import make_codec

# The same examples in every run, so a failure is caused by the change. --hypothesis-seed searches for new examples.
settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.load_profile("repeatable")


@pytest.fixture(params=["table", "hooks"])
def codec(request):
    """The codec with torch's C function table, and with the Python hooks.

    They are the same for a torch without the table.
    """
    return make_codec() if request.param == "table" else slow_codec()
