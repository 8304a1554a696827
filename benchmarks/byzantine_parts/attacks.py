"""The rows of the table, by name."""

from __future__ import annotations

from benchmarks.byzantine_parts.attack import Attack
from benchmarks.byzantine_parts.false_members import (
    AnotherNumber,
    FalseAccusation,
    HitAndRun,
    HonestOnProbation,
    InflatedProgress,
    LeavesOut,
    LiesInItsOwnSlice,
    LyingLeader,
    SilentReducer,
    SilentWhenDrawn,
    TwoAverages,
    Vouching,
    WrongReducer,
)
from benchmarks.byzantine_parts.false_senders import (
    ConstantDirection,
    Delayed,
    HugeWeight,
    InnerProduct,
    InsideTheTolerance,
    KnowsSketches,
    LabelFlip,
    LittleIsEnough,
    Noise,
    NotANumber,
    SignFlip,
    WeightAtTheBound,
)

FEW = ("mean", "CenteredClip", "ours")  # columns
ATTACKS: tuple[Attack, ...] = (
    SignFlip("sign flip x1000"),
    SignFlip("sign flip of honest norm", times=1.0),
    LabelFlip("label flip"),
    ConstantDirection("constant direction"),
    Delayed("delayed gradients"),
    InnerProduct("inner product 0.1"),
    InnerProduct("inner product 0.6", share=0.6),
    LittleIsEnough("a little is enough"),
    Noise("random noise"),
    NotANumber("NaN"),
    HugeWeight("weight 1e6"),
    SilentReducer("silent reducers"),
    WrongReducer("wrong reducers"),
    TwoAverages("two averages"),
    LeavesOut("honest ones left out"),
    KnowsSketches("knows earlier sketches"),
    WeightAtTheBound("weight at the bound", FEW),
    LiesInItsOwnSlice("lies in its own slice", FEW),
    SilentWhenDrawn("silent when drawn", FEW),
    AnotherNumber("another number to each", FEW),
    HitAndRun("hit and run reducer", FEW),
    WrongReducer("wrong reducers x1e6", FEW, times=1e6),
    InsideTheTolerance("inside the tolerance", FEW),
    HonestOnProbation("honest on probation", FEW),
    InflatedProgress("inflated progress"),
    LyingLeader("lying leader"),
    FalseAccusation("false accusation"),
    Vouching("validators vouch for each other"),
)
