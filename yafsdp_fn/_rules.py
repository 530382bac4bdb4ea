"""The table of operators: one line a rule, each a pattern of factors.

An operator that is not here, or whose call does not fit its pattern, is computed whole
on gathered operands: slower, and right. So a rule may only be added where it holds for
every call that its pattern fits; the tests compare each with the unsharded operator.
"""

from typing import Any

import torch

from . import _rule_layers as layers
from . import _rule_lookups as lookups
from . import _rule_views as views
from ._rule_kinds import (
    EITHER,
    Rule,
    Site,
    along,
    filled,
    matrices,
    names,
    pattern,
    pointwise,
    reduction,
)
from ._sharding import Sharding

aten = torch.ops.aten


def find(site: Site) -> Sharding | None:
    """The sharding of a call, or None if it must be computed whole."""
    rule = RULES.get(site.node.op)
    if rule is None and torch.Tag.pointwise in site.node.op.tags:
        rule = pointwise
    return rule(site) if rule else None


def is_elementwise(op: Any) -> bool:
    """Whether an operator works on every element by itself."""
    rule = RULES.get(op)
    tags = getattr(op, "tags", ())  # a function in an operator's place has none
    return rule is pointwise or (rule is None and torch.Tag.pointwise in tags)


def is_product(op: Any) -> bool:
    """Whether an operator is a matrix product."""
    return op in (aten.mm.default, aten.bmm.default, aten.mv.default)


def is_local(op: Any) -> bool:
    """Whether an operator takes no more work in parts than in one piece."""
    return is_elementwise(op) or op in VIEWS or op in _JOINS


RULES: dict[Any, Rule] = {
    # matrix products
    aten.mm.default: pattern("m k, k n -> m n", linear=EITHER),
    aten.bmm.default: pattern("b m k, b k n -> b m n", linear=EITHER),
    aten.mv.default: pattern("m k, k -> m", linear=EITHER),
    aten.dot.default: pattern("k, k ->"),
    aten.vdot.default: pattern("k, k ->"),
    aten.addmm.default: lambda site: layers.added_product(site, "m n", "m k, k n"),
    aten.baddbmm.default: lambda site: layers.added_product(
        site, "b m n", "b m k, b k n"
    ),
    # elementwise operators that torch does not mark as such
    **dict.fromkeys(
        (
            aten.clone.default,
            aten._to_copy.default,
            aten.where.self,
            aten.masked_fill.Scalar,
            aten.masked_fill.Tensor,
            aten.gelu_backward.default,
            aten.leaky_relu_backward.default,
            aten.elu_backward.default,
            aten.rsub.Tensor,
            aten.hardswish.default,
            aten.hardswish_backward.default,
            aten.hardtanh_backward.default,
            aten.hardsigmoid_backward.default,
            aten.softplus_backward.default,
            aten.softshrink_backward.default,
            aten.mish_backward.default,
            aten.log_sigmoid_forward.default,
            aten.log_sigmoid_backward.default,
            aten._prelu_kernel.default,
            aten._prelu_kernel_backward.default,
            aten.complex.default,
            aten.polar.default,
            aten.lerp.Tensor,
            aten.copy.default,
        ),
        pointwise,
    ),
    # views
    aten.view.default: views.reshape,
    aten._unsafe_view.default: views.reshape,
    aten.reshape.default: views.reshape,
    aten._reshape_copy.default: views.reshape,
    aten.unsqueeze.default: views.unsqueeze,
    aten.squeeze.dims: views.squeeze,
    aten.permute.default: views.permuted(
        lambda site, rank: [d % rank for d in site.arg("dims")]
    ),
    aten.transpose.int: views.permuted(views.transposed),
    aten.t.default: views.permuted(lambda site, rank: list(reversed(range(rank)))),
    aten.expand.default: views.expand,
    aten.repeat.default: views.repeat,
    aten.slice.Tensor: views.slices,
    aten.select.int: views.select,
    aten.unbind.int: views.unbind,
    aten.split.Tensor: views.split,
    aten.split_with_sizes.default: views.split,
    aten.unsafe_split.Tensor: views.split,
    aten.unsafe_split_with_sizes.default: views.split,
    aten.unfold.default: views.unfold,
    aten.diagonal.default: views.diagonal,
    aten.select_backward.default: views.select_backward,
    aten.slice_backward.default: views.slice_backward,
    aten.slice_scatter.default: views.slice_scatter,
    aten.select_scatter.default: views.select_scatter,
    aten.cat.default: views.cat,
    aten.stack.default: views.stack,
    aten.constant_pad_nd.default: views.pad,
    aten.view_as_real.default: lambda site: site.make(
        [names(site.inputs[0].shape)], [[*names(site.inputs[0].shape), "c!"]]
    ),
    aten.view_as_complex.default: lambda site: site.make(
        [[*names(site.inputs[0].shape)[:-1], "c!"]],
        [names(site.inputs[0].shape)[:-1]],
    ),
    # reductions
    aten.sum.default: reduction("sum", None),
    aten.sum.dim_IntList: reduction("sum"),
    aten.amax.default: reduction("max"),
    aten.amin.default: reduction("min"),
    aten.any.default: reduction("max", None),
    aten.any.dim: reduction("max"),
    aten.any.dims: reduction("max"),
    aten.all.default: reduction("min", None),
    aten.all.dim: reduction("min"),
    aten.all.dims: reduction("min"),
    aten.prod.dim_int: reduction(None),
    aten.logsumexp.default: reduction(None),
    aten.max.dim: reduction(None),
    aten.min.dim: reduction(None),
    aten.median.dim: reduction(None),
    aten.mode.default: reduction(None),
    aten.kthvalue.default: reduction(None),
    aten.argmax.default: reduction(None),
    aten.argmin.default: reduction(None),
    aten.linalg_vector_norm.default: reduction(None),
    # along one dimension
    aten._softmax.default: along("dim"),
    aten._log_softmax.default: along("dim"),
    aten._softmax_backward_data.default: along("dim"),
    aten._log_softmax_backward_data.default: along("dim"),
    aten.cumsum.default: along("dim"),
    aten.cumprod.default: along("dim"),
    aten.logcumsumexp.default: along("dim"),
    aten.sort.default: along("dim"),
    aten.sort.stable: along("dim"),
    aten.topk.default: along("dim"),
    aten.flip.default: along("dims"),
    aten.roll.default: along("dims"),
    aten._fft_r2c.default: along("dim"),
    aten._fft_c2c.default: along("dim"),
    aten._fft_c2r.default: along("dim"),
    # on the last two dimensions
    aten.tril.default: matrices(2),
    aten.triu.default: matrices(2),
    # on planes and volumes
    **dict.fromkeys(
        (
            aten.avg_pool2d.default,
            aten.avg_pool2d_backward.default,
            aten.max_pool2d_with_indices.default,
            aten.max_pool2d_with_indices_backward.default,
            aten._adaptive_avg_pool2d.default,
            aten._adaptive_avg_pool2d_backward.default,
            aten.reflection_pad2d.default,
            aten.reflection_pad2d_backward.default,
            aten.replication_pad2d.default,
            aten.replication_pad2d_backward.default,
        ),
        matrices(2),
    ),
    **dict.fromkeys(
        (
            aten.reflection_pad1d.default,
            aten.reflection_pad1d_backward.default,
            aten.replication_pad1d.default,
            aten.replication_pad1d_backward.default,
        ),
        matrices(1),
    ),
    **dict.fromkeys(
        (
            aten.avg_pool3d.default,
            aten.avg_pool3d_backward.default,
            aten.max_pool3d_with_indices.default,
            aten.max_pool3d_with_indices_backward.default,
        ),
        matrices(3),
    ),
    **dict.fromkeys(
        (
            aten.upsample_nearest1d.default,
            aten.upsample_linear1d.default,
        ),
        matrices(1),
    ),
    **dict.fromkeys(
        (
            aten.upsample_nearest2d.default,
            aten.upsample_bilinear2d.default,
            aten.upsample_bicubic2d.default,
        ),
        matrices(2),
    ),
    aten.upsample_nearest1d_backward.default: matrices(1, "input_size"),
    aten.upsample_linear1d_backward.default: matrices(1, "input_size"),
    aten.upsample_nearest2d_backward.default: matrices(2, "input_size"),
    aten.upsample_bilinear2d_backward.default: matrices(2, "input_size"),
    aten.upsample_bicubic2d_backward.default: matrices(2, "input_size"),
    # lookups
    aten.embedding.default: lookups.embedding,
    aten.embedding_dense_backward.default: lookups.embedding_backward,
    aten.gather.default: lookups.gather,
    aten.scatter.src: lookups.scatter,
    aten.scatter.value: lookups.scatter,
    aten.scatter_add.default: lookups.scatter,
    aten.scatter_reduce.two: lookups.scatter,
    aten.bucketize.Tensor: lookups.bucketize,
    aten.index_select.default: lookups.index_select,
    aten.index_add.default: lookups.index_add,
    aten.index.Tensor: lookups.index,
    aten.index_put.default: lookups.index_put,
    aten._unsafe_index.Tensor: lookups.index,
    aten._unsafe_index_put.default: lookups.index_put,
    # layers
    aten.native_layer_norm.default: layers.layer_norm,
    aten.native_layer_norm_backward.default: layers.layer_norm_backward,
    aten._fused_rms_norm.default: layers.layer_norm,
    aten._fused_rms_norm_backward.default: layers.layer_norm_backward,
    aten._scaled_dot_product_flash_attention_for_cpu.default: layers.attention,
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default: layers.attention,
    aten.convolution.default: layers.convolution,
    aten.convolution_backward.default: layers.convolution_backward,
    # optimisers
    aten._fused_adamw.default: layers.fused_optimiser,
    aten._fused_adamw.tensor_lr: layers.fused_optimiser,
    aten._fused_adam.default: layers.fused_optimiser,
    aten._fused_adam.tensor_lr: layers.fused_optimiser,
    # constants
    aten.full.default: filled("size"),
    aten.zeros.default: filled("size"),
    aten.ones.default: filled("size"),
    aten.empty.memory_format: filled("size"),
}


VIEWS = {
    aten.view.default,
    aten._unsafe_view.default,
    aten.reshape.default,
    aten.unsqueeze.default,
    aten.squeeze.dims,
    aten.permute.default,
    aten.transpose.int,
    aten.t.default,
    aten.select.int,
    aten.slice.Tensor,
}

_JOINS = {aten.expand.default, aten.stack.default, aten.cat.default}
