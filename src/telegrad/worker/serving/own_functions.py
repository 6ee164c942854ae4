"""Functions of Telegrad that a worker with an allow-list runs for other members.

Each has the reason for which it opens no way around the list. "Checks" means that the function asks the worker's policy
(`telegrad.worker.serving.exposure`) for what it runs of the program. The others run no code that their caller chooses:
they work on values of Telegrad's own classes, or call methods of torch's classes whose names are fixed.
"""

from typing import Final

__all__ = ["METHODS_OF_MODULES", "OWN_FUNCTIONS"]

_PIPELINE, _OPTIMIZER, _MODULE = "telegrad.nn.pipeline.requests", "telegrad.optim.owner", "telegrad.nn.owner"
_STAGE = "moves tensors and numbers of a stage that `make_stage` has created"
_PART = "works on a part that `make_local_optimizer` has created, with numbers and tensors"
_TORCH_OPTIMIZER = "creates an optimizer of torch over given parameters, and does nothing else"

OWN_FUNCTIONS: Final[dict[str, str]] = {
    # values of references
    "builtins:type": "returns the type of a value; the form with three arguments, which creates classes, is not run",
    "telegrad.worker.calls.callables:read_attribute": "checks each attribute of the path like a method",
    "telegrad.rref.backward:run_backward": "runs a backward pass from a referenced tensor",
    # functions of the program within messages of Telegrad
    "telegrad.streams.serving:open_function": "checks the generator function",
    "telegrad.streams.serving:open_method": "checks the method",
    "telegrad.streams.serving:pull": "advances a generator that was opened",
    "telegrad.streams.serving:flush": "returns items of a generator that was opened",
    "telegrad.streams.serving:close": "closes a generator that was opened",
    "telegrad.rpc.chunks:run_chunk": "checks the function of the map",
    "telegrad.worker.serving.once:run_once": "checks the function of the call",
    # the group
    "telegrad.worker.membership.joining:_ping": "returns nothing",
    "telegrad.rpc.services:_registered": "returns a reference that the program has registered as a service",
    "telegrad.rpc.api:_gather_to_leader": "stores a value for a gathering",
    "telegrad.rpc.api:_broadcast_to_followers": "stores values for a gathering",
    "telegrad.rpc.gathering_handlers:withdraw": "drops a value that a worker has stored for a gathering",
    "telegrad.rpc.gathering_handlers:is_waiting": "returns whether this worker waits in a gathering",
    "telegrad.rpc.gathering_handlers:receive_failure": "ends a gathering with an error of a fixed set of classes",
    # remote modules
    f"{_MODULE}:make_module": "checks the class",
    f"{_MODULE}:forward_on_device": "checks that the value may be called",
    f"{_MODULE}:items_on_device": "checks that the value may be called",
    f"{_MODULE}:parameters_of": "calls `parameters` of the module, and returns references",
    f"{_MODULE}:submodule_of": "calls `get_submodule` of the module, and returns a reference and names",
    f"{_MODULE}:change": "checks the method, unless it is one of METHODS_OF_MODULES",
    f"{_MODULE}:state_of": "calls `state_dict` of the module",
    f"{_MODULE}:load_state": "calls `load_state_dict` of the module",
    f"{_MODULE}:read_member": "checks the attribute like a method; names only what it may read",
    # pipelines
    f"{_PIPELINE}:make_stage": "checks the loss function; the module exists",
    f"{_PIPELINE}:connect": "sets the neighbors of a stage; what is sent to them is fixed",
    f"{_PIPELINE}:accept_inputs": _STAGE,
    f"{_PIPELINE}:accept_gradients": _STAGE,
    f"{_PIPELINE}:feed": _STAGE,
    f"{_PIPELINE}:feed_targets": _STAGE,
    f"{_PIPELINE}:run_step": _STAGE,
    f"{_PIPELINE}:drop_step": _STAGE,
    f"{_PIPELINE}:reset_gradients": _STAGE,
    # optimizers
    f"{_OPTIMIZER}:make_local_optimizer": "checks the class",
    f"{_OPTIMIZER}:add_group": _PART,
    f"{_OPTIMIZER}:undo_add": _PART,
    f"{_OPTIMIZER}:step_of": _PART,
    f"{_OPTIMIZER}:zero_grad": _PART,
    f"{_OPTIMIZER}:accumulate": _PART,
    f"{_OPTIMIZER}:norms_of": _PART,
    f"{_OPTIMIZER}:norms_of_references": "reads the gradients of referenced tensors",
    f"{_OPTIMIZER}:scale": _PART,
    f"{_OPTIMIZER}:scale_references": "multiplies the gradients of referenced tensors",
    f"{_OPTIMIZER}:unscale": _PART,
    f"{_OPTIMIZER}:state_of": _PART,
    f"{_OPTIMIZER}:load_state": _PART,
    "torch.optim.adadelta:Adadelta": _TORCH_OPTIMIZER,
    "torch.optim.adagrad:Adagrad": _TORCH_OPTIMIZER,
    "torch.optim.adam:Adam": _TORCH_OPTIMIZER,
    "torch.optim.adamax:Adamax": _TORCH_OPTIMIZER,
    "torch.optim.adamw:AdamW": _TORCH_OPTIMIZER,
    "torch.optim.asgd:ASGD": _TORCH_OPTIMIZER,
    "torch.optim.nadam:NAdam": _TORCH_OPTIMIZER,
    "torch.optim.radam:RAdam": _TORCH_OPTIMIZER,
    "torch.optim.rmsprop:RMSprop": _TORCH_OPTIMIZER,
    "torch.optim.rprop:Rprop": _TORCH_OPTIMIZER,
    "torch.optim.sgd:SGD": _TORCH_OPTIMIZER,
    "torch.optim.sparse_adam:SparseAdam": _TORCH_OPTIMIZER,
    # torch's interface below `rpc_sync`
    "telegrad.compat.rpc.invoke:run_operator": "checks the operator",
    "telegrad.compat.rpc.invoke:run_scripted": "checks the scripted function",
    "telegrad.compat.rpc.invoke:run_scripted_async": "checks the scripted function",
}

METHODS_OF_MODULES: Final = frozenset(
    (
        "to", "to_empty", "cuda", "ipu", "xpu", "mtia", "cpu", "type", "float", "double", "half", "bfloat16",
        "requires_grad_", "share_memory", "zero_grad", "train", "parameters", "get_submodule", "state_dict",
        "load_state_dict",
    )
)  # fmt: skip
"""Methods of `torch.nn.Module` that `telegrad.nn.RemoteModule` calls; they run no function that they are given."""
