"""A larger batch with its learning rate: which loaders, which optimizers, and what nobody else sees of it."""

from __future__ import annotations

import copy
import weakref

import pytest

torch = pytest.importorskip("torch")

from saturate.agent.context import Context  # noqa: E402 - after the import that decides whether to run at all
from saturate.records.facts import Facts  # noqa: E402
from saturate.techniques import global_batch  # noqa: E402

DATA = torch.utils.data.TensorDataset(torch.arange(40.0))


@pytest.fixture
def context():
    made = Context(torch)
    yield made
    made.undo()


def sizes(context, dataset=DATA, **given):
    arguments = {"dataset": dataset, "batch_size": 1, "shuffle": None, "sampler": None, "batch_sampler": None, **given}
    changes = {}
    for rewrite in context.loader_rewrites:
        changes.update(rewrite(dataset, {**arguments, **changes}, frozenset(given)))
    return changes.get("batch_size", given.get("batch_size"))


def test_training_loaders_and_no_others(context):
    global_batch.apply(context, global_batch.Options(factor=3))
    assert sizes(context, batch_size=4) == 4, "an evaluation loader"
    assert sizes(context, batch_size=4, shuffle=True) == 12
    again = {"sampler": torch.utils.data.RandomSampler(DATA), "collate_fn": torch.utils.data.default_collate}
    assert sizes(context, batch_size=12, **again) == 12, "built again by a framework, not enlarged again"
    other = torch.utils.data.TensorDataset(torch.arange(40.0))
    assert sizes(context, other, batch_size=4, sampler=torch.utils.data.RandomSampler(other)) == 12
    assert sizes(context, batch_size=5, sampler=torch.utils.data.SequentialSampler(DATA)) == 5
    ordered = torch.utils.data.distributed.DistributedSampler(DATA, 2, 0, shuffle=False)
    shuffled = torch.utils.data.distributed.DistributedSampler(DATA, 2, 0)
    assert sizes(context, batch_size=6, sampler=ordered) == 6 and sizes(context, batch_size=6, sampler=shuffled) == 18
    assert sizes(context, batch_size=20, shuffle=True) == 20, "the dataset does not hold 60"
    assert sizes(context, batch_size=7, sampler=shuffled) == 7, "this rank's part of it does not hold 21"
    assert sizes(context, shuffle=True) is None


def test_a_schedule_of_batch_sizes_is_enlarged_throughout(context):
    global_batch.apply(context, global_batch.Options(factor=2))
    assert [sizes(context, batch_size=size, shuffle=True) for size in (4, 8, 16, 4)] == [8, 16, 32, 8]
    sampler, other = torch.utils.data.RandomSampler(DATA), torch.utils.data.TensorDataset(torch.arange(40.0))
    assert [sizes(context, batch_size=size, sampler=sampler) for size in (4, 8, 16)] == [8, 16, 32]
    assert [sizes(context, other, batch_size=size, shuffle=True, collate_fn=list) for size in (4, 8, 16)] == [8, 16, 32]
    assert sizes(context, other, batch_size=32, sampler=sampler, collate_fn=list) == 32, "built again"


#: kind -> how many times as far a step of plain gradient goes with a factor of four
RULES = {"SGD": 4.0, "Adam": 2.0, "AdamW": 2.0, "Adagrad": 2.0, "Rprop": 1.0}


@pytest.mark.parametrize("kind", RULES)
def test_the_rule_of_each_optimizer(context, kind, capfd):
    moved = []
    for scaled in (False, True):
        if scaled:
            global_batch.apply(context, global_batch.Options(factor=4))
            sizes(context, batch_size=4, shuffle=True)
        parameter = torch.nn.Parameter(torch.zeros(3))
        settings = {"weight_decay": 0.0} if kind == "AdamW" else {}
        optimizer = getattr(torch.optim, kind)([parameter], lr=0.01, **settings)
        parameter.grad = torch.ones(3)
        optimizer.step()
        moved.append(float(parameter.detach().abs().max()))
        assert optimizer.param_groups[0]["lr"] == 0.01 == optimizer.state_dict()["param_groups"][0]["lr"]
    assert moved[1] / moved[0] == pytest.approx(RULES[kind], rel=1e-4)
    assert ("no rule for Rprop" in capfd.readouterr().err) == (kind == "Rprop")


@pytest.mark.parametrize("rule, scale", [("linear", 4.0), ("sqrt", 2.0), ("none", 1.0)])
def test_a_rule_by_name(context, rule, scale):
    global_batch.apply(context, global_batch.Options(factor=4, rule=rule))
    sizes(context, batch_size=4, shuffle=True)
    assert step_with_sgd(lr=0.1) == pytest.approx(-0.1 * scale)


def step_with_sgd(lr, before=lambda optimizer: None):
    parameter = torch.nn.Parameter(torch.zeros(()))
    optimizer = torch.optim.SGD([parameter], lr=lr)
    before(optimizer)
    parameter.grad = torch.ones(())
    optimizer.step()
    return float(parameter.detach())


def test_no_loader_no_scaling(context):
    global_batch.apply(context, global_batch.Options(factor=4))
    assert step_with_sgd(lr=0.1) == pytest.approx(-0.1)


def test_schedules_that_set_the_rate_follow_the_rule(context):
    """By hand, and by a scheduler that knows nothing of the optimizer's rate."""
    global_batch.apply(context, global_batch.Options(factor=4))
    sizes(context, batch_size=4, shuffle=True)
    assert step_with_sgd(0.1, lambda optimizer: optimizer.param_groups[0].update(lr=0.5)) == pytest.approx(-2.0)
    expected = torch.optim.SGD([torch.nn.Parameter(torch.zeros(()))], lr=1.0)
    first = torch.optim.lr_scheduler.OneCycleLR(expected, max_lr=0.8, total_steps=9).get_last_lr()[0]
    schedule = lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.8, total_steps=9)  # noqa: E731
    assert step_with_sgd(1.0, schedule) == pytest.approx(-4 * first)


@pytest.mark.parametrize("by", ["position", "keyword"])
@pytest.mark.parametrize("rate", [0.1, torch.tensor(0.1)], ids=["number", "tensor"])
def test_a_closure_sees_and_sets_the_script_s_own_rate(context, by, rate):
    """By hand, and by a scheduler that multiplies the rate which it finds."""
    global_batch.apply(context, global_batch.Options(factor=4))
    sizes(context, batch_size=4, shuffle=True)
    parameter, seen, moved = torch.nn.Parameter(torch.zeros(())), [], []
    optimizer = torch.optim.SGD([parameter], lr=rate if isinstance(rate, float) else rate.clone())
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)

    def closure():
        seen.append(float(optimizer.param_groups[0]["lr"]))
        parameter.grad = torch.ones(())
        if len(seen) == 3:
            optimizer.param_groups[0]["lr"] = 1.0
        else:
            schedule.step()

    for _ in range(4):
        before = float(parameter.detach())
        optimizer.step(**{"closure": closure}) if by == "keyword" else optimizer.step(closure)
        moved.append(before - float(parameter.detach()))
    assert seen == pytest.approx([0.1, 0.05, 0.025, 1.0])
    assert moved == pytest.approx([0.2, 0.1, 4.0, 2.0], rel=1e-5)
    assert float(optimizer.param_groups[0]["lr"]) == 0.5 == float(schedule.get_last_lr()[0])


def test_an_optimizer_that_reads_its_rate_before_its_closures_is_scaled(context):
    """LBFGS, which calls one again and again."""
    def rate(scaled):
        if scaled:
            global_batch.apply(context, global_batch.Options(factor=4, rule="linear"))
            sizes(context, batch_size=4, shuffle=True)
        parameter, seen = torch.nn.Parameter(torch.ones(())), []
        optimizer = torch.optim.LBFGS([parameter], lr=0.01, max_iter=3)

        def closure():
            seen.append(optimizer.param_groups[0]["lr"])
            optimizer.zero_grad()
            loss = parameter.square()
            loss.backward()
            return loss

        optimizer.step(closure)
        assert seen == [0.01] * len(seen) and len(seen) > 1
        return parameter.detach()

    plain = rate(scaled=False)
    assert rate(scaled=True) < plain - 0.05


def test_a_step_that_raises_does_not_raise_the_rate_for_good(context):
    global_batch.apply(context, global_batch.Options(factor=4))
    sizes(context, batch_size=4, shuffle=True)
    parameter = torch.nn.Parameter(torch.zeros(()))
    optimizer = torch.optim.SGD([parameter], lr=0.1)

    def closure():
        raise ValueError("mine")

    with pytest.raises(ValueError):
        optimizer.step(closure)
    parameter.grad = torch.ones(())
    optimizer.step()
    assert float(parameter.detach()) == pytest.approx(-0.4)
    assert optimizer.param_groups[0]["lr"] == 0.1
    with pytest.raises(ValueError):
        optimizer.step(closure)
    optimizer.param_groups[0]["lr"] = 0.5       # the script goes on with another one
    optimizer.step()
    assert float(parameter.detach()) == pytest.approx(-2.4)
    assert optimizer.param_groups[0]["lr"] == 0.5


def test_a_checkpoint_after_an_interrupted_step_holds_the_script_s_own_rate(context):
    """Ctrl-C in a step: the handler saved a rate four times as large, and what went on from there multiplied it again."""
    global_batch.apply(context, global_batch.Options(factor=4))
    sizes(context, batch_size=4, shuffle=True)

    def step(self, closure=None):
        raise KeyboardInterrupt

    interrupted = type("SGD", (torch.optim.SGD,), {"step": step})
    optimizer = interrupted([torch.nn.Parameter(torch.zeros(()))], lr=0.1)
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            optimizer.step()
        assert optimizer.state_dict()["param_groups"][0]["lr"] == 0.1
    context.undo()
    assert torch.optim.Optimizer.state_dict.__code__.co_filename.startswith(torch.__path__[0])


def test_datasets_are_not_kept(context):
    """One shard after the other, each dropped by the script, filled the memory."""
    global_batch.apply(context, global_batch.Options(factor=4))
    alive = []
    for _ in range(20):
        shard = torch.utils.data.TensorDataset(torch.arange(40.0))
        assert sizes(context, shard, batch_size=4, shuffle=True) == 16
        alive.append(weakref.ref(shard))
    del shard
    assert [one() for one in alive] == [None] * 20
    assert sizes(context, list(range(40)), batch_size=4, shuffle=True) == 16, "a list takes no weak references"


def test_copies_and_resumed_optimizers_are_scaled_once(context):
    global_batch.apply(context, global_batch.Options(factor=4))
    sizes(context, batch_size=4, shuffle=True)
    parameter = torch.nn.Parameter(torch.zeros(()))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    for _ in range(3):
        parameter.grad = torch.ones(())
        optimizer.step()
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert float(parameter.detach()) == pytest.approx(-1.2)
    context.undo()
    optimizer.step()
    assert float(parameter.detach()) == pytest.approx(-1.3)


def test_it_is_put_into_a_recipe_by_hand():
    assert not global_batch.eligible(Facts())
    for wrong in ({"factor": 1}, {"rule": "cubic"}):
        with pytest.raises(ValueError):
            global_batch.Options(**wrong)


@pytest.mark.parametrize("rule", ["linear", "sqrt"])
def test_an_optimizer_without_a_learning_rate_is_left_alone(context, rule, capfd):
    class Own(torch.optim.Optimizer):
        def __init__(self, parameters):
            super().__init__(parameters, {"alpha": 0.5})

        def step(self, closure=None):
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter.data -= group["alpha"] * parameter.grad

    global_batch.apply(context, global_batch.Options(factor=4, rule=rule))
    sizes(context, batch_size=4, shuffle=True)
    parameter = torch.nn.Parameter(torch.zeros(3))
    parameter.grad = torch.ones(3)
    optimizer = Own([parameter])
    for _ in range(2):
        optimizer.step()
    assert parameter.tolist() == [-1.0] * 3
    assert capfd.readouterr().err == "saturate: global-batch: there is no lr in the groups of Own; its learning rate stays as it is\n"
