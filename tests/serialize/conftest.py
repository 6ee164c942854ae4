import pytest
from carrying import slow_codec
from hypothesis import settings

from telegrad.serialize.tensors import make_codec

# The same examples at every run: a failure is one of the change at hand. (To look for new ones: --hypothesis-seed.)
settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.load_profile("repeatable")


@pytest.fixture(params=["table", "hooks"])
def codec(request):
    """The codec on either way to torch; for a torch without the C function table the two are the same."""
    return make_codec() if request.param == "table" else slow_codec()
