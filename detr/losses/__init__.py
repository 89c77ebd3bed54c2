"""Set prediction: match queries to boxes, then score the matches."""

from detr.losses.criterion import LossOutput, SetCriterion
from detr.losses.matcher import HungarianMatcher, MatchingProblem
from detr.losses.matches import Matches
from detr.losses.padded_targets import PaddedTargets

__all__ = ["HungarianMatcher", "LossOutput", "Matches", "MatchingProblem", "PaddedTargets", "SetCriterion"]
