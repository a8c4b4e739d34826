"""Sentences on what was edited, from the facts of both sides."""

from typing import Any

from pytest_aorta.result.series import LocalWeights, Setting, diverged, series_facts
from pytest_aorta.result.trace.profiled_steps import CollectiveCost, Costs, CostsOfRanks
from pytest_aorta.verdict.edits import edits
from tests.unit.builders import each_of, make_facts
from tests.unit.verdict.test_series import launch, series

LR = {"lr": {"1": 0.01, "2": 0.009}}
WITH_DECAY = "lr", "weight_decay"
COSTS = Costs(flops={"aten::mm": 8, "aten::addmm": 4}, host_copies={"aten::_local_scalar_dense": 4})
FROZEN = "look at what is frozen, or has no gradient"
HALF = {"aten::mm": 4, "aten::addmm": 2}
READ = COSTS.replace(host_copies={"aten::_local_scalar_dense": 5})
GATHER = CollectiveCost(kind="all_gather", calls=2, group_size=2, dtype="float32")
GATHERED = COSTS.replace(collectives=[GATHER])


def facts(
    *ranks: dict[str, Any],
    costs: Costs = COSTS,
    settings: dict[str | tuple[str, str], Any] | None = None,
    **changes: Any,
) -> Any:
    named = {(key, "") if isinstance(key, str) else key: values for key, values in (settings or {}).items()}
    changes["settings"] = [Setting(*key, values) for key, values in named.items()]
    of_ranks = [series(**{"loss": [1.0, 0.5], "weights": {"0": "aa"}} | changes | rank) for rank in ranks or ({}, {})]
    replicas = diverged([[rank] for rank in of_ranks])
    return launch(*of_ranks, costs=[CostsOfRanks([*range(len(of_ranks))], costs)], replicas=replicas)


def buffers(rows: dict[str, str]) -> LocalWeights:
    return series(weights=rows).weights


CASES = {
    "nothing": (facts(settings=LR), facts(settings=LR), []),
    "scheduled rate": (
        facts(settings={"lr": {"1": 0.01, "2": 0.0095}}),
        facts(settings=LR),
        ["the learning rate changed: 0.009 -> 0.0095 from step 2"],
    ),
    "one of two groups": (
        facts(settings={("weight_decay", "a"): {"1": 0.1}, ("weight_decay", "b"): {"1": 0.0}}),
        facts(settings={("weight_decay", "a"): {"1": 0.1}, ("weight_decay", "b"): {"1": 0.1}}),
        ["weight decay of b changed: 0.1 -> 0 from step 1"],
    ),
    "groups with values of their own": (
        facts(settings={("lr", name): {"1": rate} for name, rate in zip("abc", (0.1, 0.2, 0.3), strict=True)}),
        facts(settings={("lr", name): {"1": rate} for name, rate in zip("abc", (0.2, 0.4, 0.3), strict=True)}),
        ["the learning rate of a changed: 0.2 -> 0.1, and otherwise in 1 other group, from step 1"],
    ),
    "ranks with values of their own": (
        facts(*({"settings": [Setting("batch", values={"1": size})]} for size in ("[2]", "[3]"))),
        facts(*({"settings": [Setting("batch", values={"1": size})]} for size in ("[4]", "[5]"))),
        ["the batch changed: [4] -> [2] on rank 0, and otherwise on 1 other rank, from step 1"],
    ),
    "one rank": (
        facts({}, {"settings": [Setting("lr", values={"1": 0.1})]}, settings={"lr": {"1": 0.2}}),
        facts(settings={"lr": {"1": 0.2}}),
        ["the learning rate changed: 0.2 -> 0.1 on rank 1 from step 1"],
    ),
    "all groups": (
        facts(settings={("lr", "a"): {"1": 0.1}, ("lr", "b"): {"1": 0.1}}),
        facts(settings={("lr", "a"): {"1": 0.2}, ("lr", "b"): {"1": 0.2}}),
        ["the learning rate changed: 0.2 -> 0.1 from step 1"],
    ),
    "a group without parameters": (
        facts(settings={("lr", ""): {"1": 0.1}, ("lr", "b"): {"1": 0.1}}),
        facts(settings={("lr", ""): {"1": 0.2}, ("lr", "b"): {"1": 0.2}}),
        ["the learning rate changed: 0.2 -> 0.1 from step 1"],
    ),
    "two readings": (
        facts(settings=LR | {"backward passes": {"1": "2"}}),
        facts(settings={"lr": {"1": 0.02}, "backward passes": {"1": "1"}}),
        [
            "the number of backward passes a step changed: 1 -> 2 from step 1",
            "the learning rate changed: 0.02 -> 0.01 from step 1",
        ],
    ),
    "what follows is left out": (
        facts(settings={"lr": {"1": 0.01, "9": 0.001}, "dropout": {"1": "off"}}, num_steps=9),
        facts(settings={"lr": {"1": 0.01}, "dropout": {"1": "0.1"}}, num_steps=9),
        ["dropout changed: 0.1 -> off from step 1"],
    ),
    "looks at the model at other times, and at a model that was wrapped again": (
        facts(settings={"dropout": {"1": "0.1"}, "trained elements": {"1": "8", "29": "9"}}, num_steps=50),
        facts(settings={"dropout": {"1": "0.1", "25": "off"}, "trained elements": {"1": "8", "25": "9"}}, num_steps=50),
        [],
    ),
    "parameters that are trained later": (
        facts(settings={"trained elements": {"1": "8", "36": "9"}}, num_steps=50),
        facts(settings={"trained elements": {"1": "8", "25": "9"}}, num_steps=50),
        ["the number of trained parameters changed: 9 -> 8 at step 33 or before"],
    ),
    "groups that are joined": (
        facts(settings={"lr": {"1": 0.1}, "weight_decay": {"1": 0.1}}),
        facts(
            settings={
                (name, group): {"1": 0.1 * (group == "a" or name == "lr")} for name in WITH_DECAY for group in "ab"
            }
        ),
        ["weight decay of b changed: 0 -> 0.1 from step 1"],
    ),
    "a group that is gone": (
        facts(settings={"lr": {"1": 0.1}}, names=["a", "c"]),
        facts(settings={("lr", "a"): {"1": 0.1}, ("lr", "b"): {"1": 0.2}}, names=["a", "b"]),
        ["parameters came or went: c is new, b is gone"],
    ),
    "setting that changes after the loss": (
        facts(settings={"lr": {"1": 0.01, "2": 0.009}}, loss=[2.0, 0.5]),
        facts(settings={"lr": {"1": 0.01}}),
        ["the loss of step 1 is 2 times as large with equal weights; look at how it is scaled or averaged"],
    ),
    "gradients": (
        facts(settings={"gradients": {"2": "added"}}),
        facts(settings={"gradients": {"2": "cleared"}}),
        ["gradients of the step before are no longer cleared (zero_grad) from step 2"],
    ),
    "gradients that are zero": (
        facts(settings={"gradients": {"2": "added"}}, weights={"0": "aa", "2": "bb"}),
        facts(settings={"gradients": {"2": "cleared"}}, weights={"0": "aa", "2": "bb"}),
        ["gradients of the step before are set to zero, and were set to None (zero_grad) from step 2"],
    ),
    "gradients that are zero beside a collective": (
        facts(settings={"gradients": {"2": "added"}}, weights={"2": "bb"}, costs=GATHERED),
        facts(settings={"gradients": {"2": "cleared"}}, weights={"2": "bb"}),
        ["all_gather over 2 ranks, float32: 0 -> 2 calls a step"],
    ),
    "parameters and a tie": (
        facts(settings={"tied parameters": {"1": "off"}}, names=["head.weight", "tok.weight"]),
        facts(settings={"tied parameters": {"1": "head.weight = tok.weight"}}, names=["old", "tok.weight"]),
        [
            "parameters came or went: head.weight is new, old is gone",
            "tied parameters changed: head.weight = tok.weight -> off from step 1",
        ],
    ),
    "collective of gradients": (
        facts({"weights": {"0": "a", "1": "b"}}, {"weights": {"0": "a", "1": "c"}}),
        facts(weights={"0": "a", "1": "b"}, costs=GATHERED),
        ["all_gather over 2 ranks, float32: 2 -> 0 calls a step; replicas differ after step 1"],
    ),
    "optimizer": (facts(optimizer="SGD"), facts(), ["the optimizer changed: AdamW -> SGD"]),
    "order over ranks": (
        facts({"samples": {"1": ["b", "a"]}}, {"samples": {"1": ["c"]}}),
        facts({"samples": {"1": ["a", "b"]}}, {"samples": {"1": ["c"]}}),
        [
            "data: the same samples in another order from step 1 on, on rank 0; look at the seed, shuffle, and "
            "sampler.set_epoch"
        ],
    ),
    "transformed samples": (
        facts(samples={"1": ["a"]}),
        facts(samples={"1": ["b"]}),
        ["data: other samples from step 1 on, on all ranks; look at the seed, shuffle, the sampler, and transforms"],
    ),
    "samples of a later step": (
        facts(samples={"1": ["a"], "8": ["c"]}),
        facts(samples={"1": ["a"], "8": ["b"]}),
        ["data: other samples at step 8 or before, on all ranks; look at the seed, shuffle, and sampler.set_epoch"],
    ),
    "read of a value": (
        facts().replace(costs=[CostsOfRanks([0], COSTS), CostsOfRanks([1], READ)]),
        facts(),
        ["the host reads a value 4 -> 5 times a step (.item(), print, float) on rank 1"],
    ),
    "batch of no loader": (
        facts(costs=COSTS.replace(flops=HALF)),
        facts(),
        ["each operator computes 0.5 times as much; look at the batch and the length of samples"],
    ),
    "batch of one rank": (
        facts().replace(costs=[CostsOfRanks([0], COSTS.replace(flops=HALF)), CostsOfRanks([1], COSTS)]),
        facts(),
        ["each operator computes 0.5 times as much on rank 0; look at the batch and the length of samples"],
    ),
    "products that are drawn": (
        facts(settings={"random numbers": {"1": "aa"}}, costs=COSTS.replace(flops=HALF)),
        facts(settings={"random numbers": {"1": "bb"}}),
        [
            "random numbers: torch's generator had another state after the first loss; look at the seed, and at what "
            "draws numbers",
            "each operator computes 0.5 times as much; look at the batch and the length of samples",
        ],
    ),
    "products of another kind of code": (
        facts(costs=COSTS.replace(flops={"aten::mm": 6}, operators={"aten::mm": 3})),
        facts(costs=COSTS.replace(flops={"aten::mm": 8}, operators={"aten::mm": 4})),
        ["aten::mm computes 8 -> 6 FLOPs a step"],
    ),
    "other shapes": (
        facts(costs=COSTS.replace(flops={"aten::mm": 6, "aten::addmm": 4}, operators={"aten::mm": 4})),
        facts(costs=COSTS.replace(operators={"aten::mm": 4})),
        ["aten::mm computes 8 -> 6 FLOPs a step in as many calls; look at shapes, such as the length of samples"],
    ),
    "one more forward pass": (
        facts(costs=READ.replace(flops={"aten::mm": 12, "aten::addmm": 5})),
        facts(),
        [
            "aten::mm computes 8 -> 12 FLOPs a step",
            "the host reads a value 4 -> 5 times a step (.item(), print, float)",
        ],
    ),
    "scaled loss": (
        facts(loss=[2.0, 0.5]),
        facts(),
        ["the loss of step 1 is 2 times as large with equal weights; look at how it is scaled or averaged"],
    ),
    "another loss that two of three ranks share": (
        facts({"loss": []}, {}, {}, loss=[1.0421, 0.5]),
        facts({"loss": []}, {}, {}),
        [
            "the loss of step 1 differs on ranks 1, 2 with equal weights; look at the data, the forward pass and the "
            "loss function"
        ],
    ),
    "loss that is zero": (
        facts(loss=[0.0, 0.5]),
        facts(),
        ["the loss of step 1 differs with equal weights; look at the data, the forward pass and the loss function"],
    ),
    "other loss of ranks": (
        facts({"loss": [1.00007, 0.5]}, {"loss": [1.00012, 0.5]}),
        facts(),
        ["the loss of step 1 differs with equal weights; look at the data, the forward pass and the loss function"],
    ),
    "initial weights": (
        facts(weights={"0": "bb"}),
        facts(),
        ["the initial weights differ on all ranks; look at the initialization, and at what is loaded"],
    ),
    "buffers that the first forward pass may have changed": (
        facts(buffers=buffers({"0": "22", "1": "13"}), loss=[2.0, 0.5]),
        facts(buffers=buffers({"0": "11", "1": "12"})),
        ["the loss of step 1 is 2 times as large with equal weights; look at how it is scaled or averaged"],
    ),
    "buffers of the first step alone": (
        facts(buffers=buffers({"0": "22", "1": "11"})),
        facts(buffers=buffers({"0": "11", "1": "11"})),
        ["buffers of p0, p1 differ on all ranks before the first update; look at the data, and at what updates them"],
    ),
    "buffers with equal weights": (
        facts(buffers=buffers({"1": "11", "2": "12"}), weights={"1": "aa", "2": "aa"}),
        facts(buffers=buffers({"1": "11", "2": "11"}), weights={"1": "aa", "2": "aa"}),
        ["buffers of p1 differ on all ranks after step 2 with equal weights; look at what updates them"],
    ),
    "names of other steps": (
        facts(weights={"2": "aa"}, names=["a", "b"]),
        facts(weights={"0": "aaa"}, names=["a", "b", "c"]),
        [],
    ),
    "gradients that are still scaled": (
        facts(grad_norm={"1": 1024.0}),
        facts(grad_norm={"1": 1.0}),
        ["the gradient norm of step 1 is 1024 times as large with equal weights; look at how it is scaled or averaged"],
    ),
    "schedule that changes betas too, and what the optimizer computes": (
        facts(settings={"betas": {"2": "(0.9, 0.9)"}, "lr": {"2": 0.1}, "d": {"1": 0.3}}),
        facts(settings={"betas": {"2": "(0.8, 0.9)"}, "lr": {"2": 0.2}, "d": {"1": 0.1, "2": 0.2}}),
        ["the learning rate changed: 0.2 -> 0.1 from step 2", "betas changed: (0.8, 0.9) -> (0.9, 0.9) from step 2"],
    ),
    "loss of one rank": (
        facts({"loss": [1.0, 0.5]}, {"loss": [3.0, 0.5]}),
        facts(),
        [
            "the loss of step 1 differs on rank 1 with equal weights; look at the data, the forward pass and the loss "
            "function"
        ],
    ),
    "loss of a later step": (
        facts({"loss": [1.0, 0.7]}, {"loss": [1.0, 0.6]}, weights={"0": "aa", "1": "bb"}),
        facts(weights={"0": "aa", "1": "bb"}),
        [
            "the loss of step 2 differs with equal weights after step 1; look at the data, what draws random numbers "
            "or changes weights or copies of them before it, the forward pass and the loss function"
        ],
    ),
    "loss after weights that are not known": (facts(loss=[1.0, 0.7]), facts(), []),
    "update": (
        facts(weights={"0": "aa", "1": "bb", "2": "cc"}, loss=[1.0, 0.5, 0.3]),
        facts(weights={"0": "aa", "1": "bb", "2": "dd"}, loss=[1.0, 0.5, 0.4]),
        [
            "the update of step 2 differs on all ranks with equal weights after step 1; look at backward, how "
            "gradients are reduced and clipped, and the optimizer"
        ],
    ),
    "parameters that are still frozen": (
        facts(weights={"1": "ab", "2": "cb"}),
        facts(weights={"1": "ab", "2": "dd"}),
        [f"the update of step 2 no longer changes p1 on all ranks; {FROZEN}"],
    ),
    "parameters that are no longer frozen": (
        facts(weights={"1": "ab", "2": "cd"}, gradients={"2": "dd"}),
        facts(weights={"1": "ab", "2": "cb"}, gradients={"2": "dd"}),
        [f"the update of step 2 now changes p1 on all ranks; {FROZEN}"],
    ),
    "what follows the last step": (
        facts(num_steps=2, weights={"1": "a", "2": "b"}, buffers=buffers({"1": "a", "2": "b"})),
        facts(num_steps=3, weights={"1": "a", "2": "c", "3": "d"}, buffers=buffers({"1": "a", "2": "c", "3": "d"})),
        ["2 steps were made, and 3 steps before"],
    ),
    "update from equal gradients": (
        facts({"weights": {"0": "aa", "1": "bb"}}, {"weights": {"0": "aa", "1": "cc"}}, gradients={"1": "dd"}),
        facts(weights={"0": "aa", "1": "bb"}, gradients={"1": "dd"}),
        [
            "the update of step 1 differs on rank 1 with equal weights, and gradients before they are reduced; look at "
            "how gradients are reduced and clipped, and the optimizer"
        ],
    ),
    "update from other gradients": (
        facts(weights={"0": "aa", "1": "bb"}, gradients={"1": "dd"}),
        facts(weights={"0": "aa", "1": "cc"}, gradients={"1": "ee"}),
        [
            "the update of step 1 differs on all ranks with equal weights, from other gradients before they are "
            "reduced; look at backward, and what the forward pass drops or detaches"
        ],
    ),
    "random numbers": (
        facts(
            {}, {"settings": [Setting("random numbers", values={"0": "aa"})]}, settings={"random numbers": {"0": "bb"}}
        ),
        facts(settings={"random numbers": {"0": "bb"}}),
        ["random numbers: torch's generator had another state when the optimizer was made; look at the seed"],
    ),
    "number of steps": (
        facts(num_steps=5, settings={"lr": {"1": 0.1}}),
        facts(num_steps=4, settings={"lr": {"1": 0.1, "5": 0.2}}),
        ["5 steps were made, and 4 steps before"],
    ),
}


@each_of("here, there, expected", CASES)
def test_sentence_names_what_differs_first(here, there, expected):
    assert edits([here], [there]) == expected


def test_random_numbers_and_buffers_that_differ_between_recorded_launches_are_no_cause():
    here, *there = (facts(settings={"random numbers": {"0": it}}, buffers=buffers({"0": it})) for it in "123")
    assert edits([here], there) == []


def test_setting_that_changes_after_a_loss_that_never_repeats_is_named():
    here, *there = (facts(settings={"lr": {"2": rate}}, loss=[1 + rate, 0.5]) for rate in (0.1, 0.2, 0.3))
    assert edits([here], there) == ["the learning rate changed: 0.2 -> 0.1 from step 2"]


def test_workload_without_recorded_optimizers_has_no_sentence():
    assert edits([make_facts()], [make_facts()]) == []


def test_setting_of_one_of_several_optimizers_is_named_with_it():
    def both(adam: float, muon: float, shape: str) -> Any:
        rates = {"AdamW": adam, "Muon": muon}
        found = [
            series(optimizer=name, settings=[Setting("lr", values={"1": rate}), Setting("batch", values={"1": shape})])
            for name, rate in rates.items()
        ]
        return make_facts(series=series_facts([found]))

    one, other = both(0.1, 0.3, "[4]"), both(0.1, 0.2, "[2]")
    alone = one.replace(series=one.series[1:])
    assert edits([alone], [one]) == ["optimizers came or went: AdamW of DDP(Net) is gone"]
    assert edits([one], [other.replace(series=other.series[::-1])]) == edits([one], [other])
    assert edits([one], [other]) == [
        "the batch changed: [2] -> [4] from step 1",
        "Muon of DDP(Net): the learning rate changed: 0.2 -> 0.3 from step 1",
    ]
