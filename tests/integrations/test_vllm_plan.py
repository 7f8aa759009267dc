"""What a model's `load_weights` would copy where, followed with tensors without memory, beside what it does copy.

The models are stand-ins that load as vLLM's do: they fuse, cut, pad, transpose, stack and tie. vLLM is not needed.
"""

import re
from types import SimpleNamespace

import pytest
import torch

import tensorhub
from tensorhub.integrations.vllm_plan import Reload, planned, refuse_unused

RANKS, HIDDEN, VOCAB, PADDED = 2, 6, 10, 16


class Model(torch.nn.Module):
    """`loaders`: of each published tensor, what is done with it. Parameters begin as -1."""

    def __init__(self, loaders, **shapes):
        super().__init__()
        self.loaders = loaders
        for name, shape in shapes.items():
            parameter = torch.nn.Parameter(torch.full(shape, -1.0), requires_grad=False)
            self.register_parameter(name, parameter)

    def load_weights(self, weights):
        for name, tensor in weights:
            if name in self.loaders:
                self.loaders[name](self, tensor)


def named(tensors):
    return [SimpleNamespace(name=n, shape=tuple(t.shape), dtype=str(t.dtype)[6:]) for n, t in tensors.items()]


def numbered(**shapes):
    """Published tensors in which every number is another one."""
    found, at = {}, 0
    for name, shape in shapes.items():
        count = torch.Size(shape).numel()
        found[name] = torch.arange(at, at + count, dtype=torch.float32).reshape(shape)
        at += count
    return found


def by_boxes(plan, tensors):
    """Parameters as the boxes fill them, by plain indexing; -1 where no box is."""
    found = {}
    for name, boxes in plan.boxes.items():
        like = plan.tensors[name]
        memory = torch.full_like(like, -1.0)
        for box in boxes:
            part = tensors[box.name][tuple(slice(a, a + n) for a, n in zip(box.at, box.size, strict=True))]
            memory.as_strided(box.size, box.strides, box.offset + memory.storage_offset()).copy_(part)
        found[name] = memory
    return found


def check(model, tensors):
    plan = planned(model, named(tensors))
    for name, parameter in model.named_parameters():
        assert (parameter == -1).all(), f"{name} was touched"
    found = by_boxes(plan, tensors)
    model.load_weights(iter(tensors.items()))
    wanted = {name: parameter.data for name, parameter in model.named_parameters()}
    assert {*found} == {*wanted}
    for name in wanted:
        assert torch.equal(torch.where(wanted[name] == 0, -1, wanted[name]), found[name]), name
    return plan


def cut(rank, dim, into, first=0):
    """As vLLM's loaders of tensor parallelism: the rank's part of what is published, into rows of a fused parameter."""

    def load(model, tensor):
        size = tensor.shape[dim] // RANKS
        data = getattr(model, into).data
        part = tensor.narrow(dim, rank * size, size)
        rows = data.narrow(0, first, size) if dim == 0 else data
        assert rows.shape == part.shape
        rows.copy_(part)

    return load


def whole(into):
    return lambda model, tensor: getattr(model, into).data.copy_(tensor)


@pytest.mark.parametrize("rank", range(RANKS))
def test_fused_cut_and_padded_as_tensor_parallelism_has_it(rank):
    def embed(model, tensor):
        first, size = rank * PADDED // RANKS, PADDED // RANKS
        mine = tensor.narrow(0, min(first, VOCAB), max(0, min(VOCAB - first, size)))
        model.embed[: len(mine)].data.copy_(mine)
        model.embed[len(mine) :].data.fill_(0)

    loaders = {
        "q": cut(rank, 0, "qkv"),
        "k": cut(rank, 0, "qkv", first=4),
        "v": cut(rank, 0, "qkv", first=6),
        "o": cut(rank, 1, "out"),
        "norm": whole("norm_weight"),
        "embed": embed,
    }
    shapes = {"qkv": (8, HIDDEN), "out": (HIDDEN, 4), "norm_weight": (HIDDEN,), "embed": (PADDED // RANKS, HIDDEN)}
    published = numbered(
        q=(8, HIDDEN), k=(4, HIDDEN), v=(4, HIDDEN), o=(HIDDEN, 8), norm=(HIDDEN,), embed=(VOCAB, HIDDEN), unused=(3,)
    )
    published = {name: tensor + 1 for name, tensor in published.items()}  # no zero: that is what padding has
    plan = check(Model(loaders, **shapes), published)
    assert {name: len(boxes) for name, boxes in plan.boxes.items()} == {
        "qkv": 3,
        "out": 1,
        "norm_weight": 1,
        "embed": 1,
    }


def test_transposed_stacked_split_and_merged():
    loaders = {
        "turned": lambda model, tensor: model.turned.data.copy_(tensor.t()),
        "expert": lambda model, tensor: [model.experts.data[at].copy_(tensor[at].t()) for at in range(3)],
        "flat": lambda model, tensor: model.flat.data.copy_(tensor.reshape(-1)),
        "split": lambda model, tensor: model.split.data.copy_(tensor.view(4, 2, 5)),
        "one": lambda model, tensor: model.one.data.copy_(tensor.reshape(1)),
        "moved": lambda model, tensor: model.moved.data.copy_(tensor.to(model.moved.device).contiguous()),
    }
    shapes = {"turned": (5, 4), "experts": (3, 5, 4), "flat": (12,), "split": (4, 2, 5), "one": (1,), "moved": (2, 3)}
    published = numbered(turned=(4, 5), expert=(3, 4, 5), flat=(3, 4), split=(8, 5), one=(), moved=(2, 3))
    check(Model(loaders, **shapes), {name: tensor + 1 for name, tensor in published.items()})


@pytest.mark.parametrize("rank", range(RANKS))
@pytest.mark.parametrize("stacked", [True, False])
def test_experts_are_stacked_in_the_parameter(rank, stacked):
    """What is published holds gate and up of all experts in one tensor, or one tensor for each of them."""
    experts, inside = 4, 6
    cut = inside // RANKS

    def load(model, part, expert, into):
        data = model.w13.data[expert].narrow(0, into * cut, cut)
        data.copy_(part.narrow(0, rank * cut, cut))

    def load_all(model, tensor):
        for into, half in enumerate(tensor.chunk(2, dim=1)):
            for expert, part in enumerate(half.unbind()):
                load(model, part, expert, into)

    if stacked:
        published, loaders = numbered(w13=(experts, 2 * inside, HIDDEN)), {"w13": load_all}
    else:
        names = {f"{expert}.{into}": (expert, into) for expert in range(experts) for into in range(2)}
        published = numbered(**dict.fromkeys(names, (inside, HIDDEN)))
        loaders = {name: lambda model, tensor, at=at: load(model, tensor, *at) for name, at in names.items()}
    published = {name: tensor + 1 for name, tensor in published.items()}
    plan = check(Model(loaders, w13=(experts, 2 * cut, HIDDEN)), published)
    assert len(plan.boxes["w13"]) == (2 if stacked else 2 * experts)


def test_heads_that_alternate_are_boxes_of_their_own():
    """Three kinds of heads in turn in what is published, one kind after the other in the parameter."""

    def load(model, tensor):
        for kind in range(3):
            model.heads.data[8 * kind :][:8].view(4, 2, 5).copy_(tensor.view(4, 3, 2, 5)[:, kind])

    plan = check(Model({"heads": load}, heads=(24, 5)), {"heads": numbered(heads=(24, 5))["heads"] + 1})
    assert len(plan.boxes["heads"]) == 12


@pytest.mark.parametrize("both", [True, False])
def test_tied_weights_are_two_boxes_of_one_memory(both):
    """Also where the loader leaves one of them out."""
    tensors = numbered(embed=(4, 3))
    loaders = {name: whole("embed") for name in ("embed", "head")[: 1 + both]}
    ties = () if both else [["embed", "head"]]
    plan = planned(Model(loaders, embed=(4, 3)), named({**tensors, "head": tensors["embed"]}), ties)
    assert [(box.name, box.offset) for box in plan.boxes["embed"]] == [("embed", 0), ("head", 0)]


def test_buffers_count_where_something_is_copied_into_them():
    model = Model({"mean": whole("mean")})
    model.register_buffer("mean", torch.zeros(3))
    model.register_buffer("cache", torch.zeros(5), persistent=False)
    assert list(planned(model, named(numbered(mean=(3,)))).boxes) == ["mean"]


def changed(operation, *, cloned=False):
    """What it is given is changed in place, and then copied."""

    def load(model, tensor):
        tensor = tensor.clone() if cloned else tensor
        operation(tensor)
        model.w.data.copy_(tensor)

    return load


@pytest.mark.parametrize(
    ("loader", "why"),
    [
        (changed(torch.Tensor.zero_), "the loader changes 'w' by zero_ before it copies it"),
        (changed(lambda tensor: tensor.mul_(2)), "the loader changes 'w' by mul_"),
        (changed(lambda tensor: tensor[:2].fill_(1)), "the loader changes 'w' by fill_"),
        (changed(lambda tensor: tensor.add_(1), cloned=True), "the loader changes 'w' by add_"),
        (changed(lambda tensor: tensor.t()[1].zero_(), cloned=True), "the loader changes 'w' by zero_"),
        (changed(lambda tensor: tensor.copy_(tensor * 2), cloned=True), "the loader changes 'w' by copy_"),
        (changed(lambda tensor: torch.neg(tensor, out=tensor)), "the loader changes 'w' by neg"),
        (changed(lambda tensor: torch._foreach_mul_([tensor], 2)), "the loader changes 'w' by _foreach_mul_"),
        (changed(lambda tensor: tensor.__setitem__(torch.tensor([0]), 0.0)), "the loader changes 'w' by index_put_"),
        (lambda model, tensor: torch.neg(torch.ones(4, 4), out=model.w.data), "parameter 'w' is changed by neg"),
        (lambda model, tensor: model.w.data.copy_(tensor * 2), "what the loader copies into it was computed first"),
        (lambda model, tensor: model.w.data.copy_(tensor.half()), "was computed first"),
        (lambda model, tensor: model.w.data.copy_(torch.cat([tensor[:2], tensor[2:]])), "was computed first"),
        (lambda model, tensor: model.w.data.mul_(2), "the loader changes it by mul_"),
        (lambda model, tensor: model.w.data[:3].copy_(tensor[:3]), "12 of its 16 elements come from what is published"),
        (lambda model, tensor: None, "0 of its 16 elements"),
        (lambda model, tensor: model.w.data.copy_(tensor[:1]), "not copied into it element by element"),
        (lambda model, tensor: tensor.sum().item(), "load_weights cannot be followed at 'w'"),
        (lambda model, tensor: torch.zeros(4, 4).copy_(tensor), "'w' is copied into what is no parameter"),
    ],
)
def test_what_is_no_plain_copy_is_refused_by_name(loader, why):
    model = Model({"w": loader}, w=(4, 4))
    with pytest.raises(tensorhub.UsageError, match=re.escape(why)) as caught:
        planned(model, named(numbered(w=(4, 4))))
    assert "'w'" in str(caught.value)
    assert (model.w == -1).all()


def test_what_is_copied_twice_is_counted_once():
    """One expert comes through two views of other shapes, and nothing comes to the other."""

    class Experts(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.experts = torch.nn.Parameter(torch.zeros(2, 4, 4), requires_grad=False)

        def load_weights(self, weights):
            for name, tensor in weights:
                (self.experts.data.view(-1)[:16] if name == "flat" else self.experts.data[0]).copy_(
                    tensor.reshape(-1) if name == "flat" else tensor
                )

    published = [SimpleNamespace(name=name, shape=(4, 4), dtype="float32") for name in ("flat", "square")]
    with pytest.raises(tensorhub.UsageError, match="16 of its 32 elements come from what is published"):
        planned(Experts(), published)


RELOAD = Reload(lambda: True, {}, frozenset())


def ranks_of(published, *loaders):
    """What each rank takes, with these loaders of its own into a `w` of (4, 6)."""
    return [planned(Model(each, w=(4, 6)), named(published), (), RELOAD).taken for each in loaders]


def test_each_element_of_what_is_published_is_taken_by_some_rank():
    published = numbered(a=(8, 6))
    both = ranks_of(published, {"a": cut(0, 0, "w")}, {"a": cut(1, 0, "w")})
    refuse_unused(named(published), (), both)
    with pytest.raises(tensorhub.UsageError, match=r"'a' of shape \[8, 6\] .* takes 24 of its 48 elements"):
        refuse_unused(named(published), (), both[:1])
    refuse_unused(named(numbered(a=(4, 6))), (), ranks_of(numbered(a=(4, 6)), *[{"a": whole("w")}] * 2))


def test_columns_of_ranks_interleave_and_what_a_loader_narrows_is_missing():
    def columns(rank):
        return {"a": lambda model, tensor: model.w.data.copy_(tensor[:4, rank * 6 : rank * 6 + 6])}

    refuse_unused(named(numbered(a=(4, 12))), (), ranks_of(numbered(a=(4, 12)), columns(0), columns(1)))
    with pytest.raises(tensorhub.UsageError, match="takes 48 of its 60 elements"):
        refuse_unused(named(numbered(a=(5, 12))), (), ranks_of(numbered(a=(5, 12)), columns(0), columns(1)))


def test_what_goes_nowhere_is_refused_unless_it_is_tied_to_what_is_taken():
    published = numbered(a=(4, 6), head=(4, 6))
    taken = ranks_of(published, {"a": whole("w")})
    refuse_unused(named(published), [("a", "head")], taken)
    with pytest.raises(tensorhub.UsageError, match=r"'head' of shape .* takes nothing of it"):
        refuse_unused(named(published), (), taken)


@pytest.mark.parametrize(
    ("load", "missing"),
    [
        (lambda model, tensor: model.w.data.copy_(-tensor), ""),
        (lambda model, tensor: model.w.data.copy_(tensor.half()), ""),
        (lambda model, tensor: model.w.data.copy_(tensor.t().contiguous().view(6, 4).t()), ""),
        (lambda model, tensor: model.w.data.copy_(torch.cat([tensor[:2], tensor[2:]])), ""),
        (lambda model, tensor: model.w.data.copy_(torch.cat([tensor, tensor])[:4]), "'a (after cat, 1)' of shape"),
        (lambda model, tensor: model.w.data.fill_(tensor.clone().t().contiguous().numel()), "'a (after clone, 1)' of"),
        (lambda model, tensor: model.w.data.copy_((tensor[:2] * 2).repeat(2, 1)), "'a' of shape [4, 6] is published"),
    ],
)
def test_a_reload_may_compute_and_cast_and_leaves_nothing_out(load, missing):
    published = numbered(a=(4, 6))
    taken = ranks_of(published, {"a": load})
    if missing:
        with pytest.raises(tensorhub.UsageError, match=re.escape(missing)):
            refuse_unused(named(published), (), taken)
    else:
        refuse_unused(named(published), (), taken)
