"""The Triton kernels on CPU tensors, through Triton's interpreter.

Run by test_triton.py in a process of its own: Triton decides when a kernel is defined whether to interpret it.
bfloat16 is left to the GPU tests, since the interpreter cannot add it.
"""

import pytest
import torch
import torch._dynamo.testing

import ops
from ops import KernelConfig, MSDeformAttn, ms_deform_attn, ms_deform_attn_fused
from ops.msda.triton import backend
from ops.testing import Case, compare, random_problem

TRITON = KernelConfig(backend="triton")
ALL = (True, True, True, True)
CASES = [
    Case(N=1, M=1),
    Case(N=1, M=1, form=4, padded=True),
    Case(D=20, P=3, M=1, form=2, padded=True),
    Case(D=1, P=1, shapes=((4, 6),)),
    Case(N=1, D=48, P=2, Lq=300, shapes=((1, 1), (3, 8))),
    Case(N=1, D=8, P=3, M=1, shapes=((3, 4), (2, 2), (1, 3), (2, 1), (4, 4)), Lq=5),
]


def test_interpreter_is_on():
    assert ops.backends()["triton"].available


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize(
    ("dtype", "accumulator"),
    [(torch.float32, "float32"), (torch.float16, "float32"), (torch.float16, "native")],
    ids=["fp32", "fp16", "fp16-native"],
)
def test_errors_are_within_the_rule(case, dtype, accumulator):
    problem, grad_output = random_problem(case, dtype)
    output = backend.forward(problem)
    gradients = backend.backward(problem, grad_output, ALL, accumulator, False)
    comparisons = compare(problem, grad_output, output, gradients, accumulator)
    assert all(comparison.passed for comparison in comparisons), "\n".join(map(str, comparisons))
    assert len(comparisons) == (5 if case.form else 4)


@pytest.mark.parametrize("case", [Case(M=1), Case(N=1, M=1, form=4, padded=True)], ids=str)
def test_deterministic_is_right(case):
    problem, grad_output = random_problem(case, torch.float32)
    output = backend.forward(problem)
    gradients = backend.backward(problem, grad_output, ALL, "float32", True)
    comparisons = compare(problem, grad_output, output, gradients)
    assert all(comparison.passed for comparison in comparisons), "\n".join(map(str, comparisons))


@pytest.mark.parametrize("needs", [(True, False, False, False), (False, True, True, True), (False, False, True, False)])
def test_only_what_is_needed(needs):
    problem, grad_output = random_problem(Case(form=2, N=1, M=1, P=2), torch.float32)
    everything = backend.backward(problem, grad_output, ALL, "float32", False)
    some = backend.backward(problem, grad_output, needs, "float32", False)
    for need, whole, part in zip(needs, everything, some, strict=True):
        assert (part is not None) == need
        if need:
            torch.testing.assert_close(part, whole, rtol=1e-5, atol=1e-6)


def test_bad_coordinates_and_masked_queries_give_exactly_zero():
    problem, grad_output = random_problem(Case(N=1, M=1), torch.float32)
    for point, bad in enumerate((float("nan"), float("inf"), 1e30)):
        problem.locations[:, :, :, :, point, 0] = bad
    gradients = backend.backward(problem, grad_output, ALL, "float32", False)
    assert (gradients.locations[:, :, :, :, :3] == 0).all()
    assert (gradients.weights[:, :, :, :, :3] == 0).all()
    assert all(torch.isfinite(grad).all() for grad in gradients[:3])

    problem, grad_output = random_problem(Case(N=1, M=1, form=2), torch.float32)
    problem.weights[:, 3] = float("-inf")
    output = backend.forward(problem)
    gradients = backend.backward(problem, grad_output, ALL, "float32", False)
    assert (output[:, 3] == 0).all()
    assert torch.isfinite(output).all()
    assert (gradients.weights[:, 3] == 0).all()
    assert (gradients.locations[:, 3] == 0).all()


def test_inputs_that_are_not_contiguous():
    problem, _ = random_problem(Case(P=1, D=4, shapes=((3, 4), (1, 2))), torch.float32)
    value = problem.value.transpose(1, 2).contiguous().transpose(1, 2)
    assert not value.is_contiguous()
    locations = problem.locations.flip(1).flip(1).transpose(0, 1).contiguous().transpose(0, 1)
    output = ms_deform_attn(value, problem.spatial_shapes, locations, problem.weights, kernel=TRITON)
    torch.testing.assert_close(output, backend.forward(problem))


def test_empty_batches_and_queries():
    problem, _ = random_problem(Case(N=0), torch.float32)
    assert backend.forward(problem).shape == (0, 37, 64)
    problem, grad_output = random_problem(Case(Lq=0), torch.float32)
    gradients = backend.backward(problem, grad_output, (*ALL[:3], False), "float32", False)
    assert (gradients.value == 0).all()


class TestOperator:
    """The operator in torch's dispatcher, with these kernels below it."""

    def arguments(self, form=2, dtype=torch.float32):
        problem, _ = random_problem(Case(form=form, Lq=7, D=4, P=2, shapes=((4, 5), (2, 3))), dtype)
        value, shapes, locations, weights, points, valid = problem
        sides = [side for pair in shapes for side in pair]
        tensors = [value, locations, weights] + ([] if points is None else [points])
        for tensor in tensors:
            tensor.requires_grad_()
        return value, sides, locations, weights, points, valid, "triton", "float32", False

    def test_opcheck(self):
        problem, grad_output = random_problem(Case(N=1, M=1, form=2, Lq=3, D=2, P=1, shapes=((4, 5),)), torch.float32)
        value, _, locations, weights, points, valid = problem
        for tensor in (value, locations, weights, points):
            tensor.requires_grad_()
        arguments = (value, [4, 5], locations, weights, points, valid, "triton", "float32", False)
        torch.library.opcheck(torch.ops.msda.attend.default, arguments)
        needs = [True] * 4
        torch.library.opcheck(
            torch.ops.msda.attend_backward.default,
            (grad_output, *arguments, needs),
            test_utils=("test_schema", "test_faketensor", "test_autograd_registration"),
        )

    def test_gradients_are_those_of_the_reference(self):
        value, sides, locations, weights, points, *_ = self.arguments()
        shapes = tuple(zip(sides[::2], sides[1::2], strict=True))

        def gradients(kernel):
            output = ms_deform_attn_fused(value, shapes, points, locations, weights, kernel=kernel)
            return torch.autograd.grad(output.square().sum(), (value, locations, weights, points))

        for given, right in zip(gradients(TRITON), gradients(KernelConfig("reference")), strict=True):
            torch.testing.assert_close(given, right, rtol=1e-4, atol=1e-5)

    def test_double_backward_is_that_of_the_reference(self):
        value, sides, locations, weights, points, *_ = self.arguments()
        shapes = tuple(zip(sides[::2], sides[1::2], strict=True))
        inputs = (value, locations, weights, points)

        def second(kernel):
            output = ms_deform_attn_fused(value, shapes, points, locations, weights, kernel=kernel)
            first = torch.autograd.grad(output.square().sum(), inputs, create_graph=True)
            return torch.autograd.grad(sum(grad.square().sum() for grad in first), inputs)

        for given, right in zip(second(TRITON), second(KernelConfig("reference")), strict=True):
            torch.testing.assert_close(given, right, rtol=1e-3, atol=1e-4)

    def test_vmap(self):
        arguments = [self.arguments() for _ in range(3)]
        stacked = [torch.stack([a[i].detach() for a in arguments]) for i in (0, 2, 3, 4)]
        sides = arguments[0][1]

        def one(value, locations, weights, points):
            return torch.ops.msda.attend.default(
                value, sides, locations, weights, points, None, "triton", "float32", False
            )

        output = torch.func.vmap(one)(*stacked)
        expected = torch.stack([one(*(tensor[i] for tensor in stacked)) for i in range(3)])
        torch.testing.assert_close(output, expected)
        # gradients flow through it, and its backward has a rule too
        leaves = [tensor.clone().requires_grad_() for tensor in stacked]
        given = torch.autograd.grad(torch.func.vmap(one)(*leaves).square().sum(), leaves)
        rows = [one(*(tensor[i] for tensor in leaves)) for i in range(3)]
        right = torch.autograd.grad(sum(row.square().sum() for row in rows), leaves)
        for a, b in zip(given, right, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)

        def gradients(grad_output, value, locations, weights, points):
            return torch.ops.msda.attend_backward.default(
                grad_output, value, sides, locations, weights, points, None, "triton", "float32", False, [True] * 4
            )

        grad_output = torch.randn_like(expected)
        given = torch.func.vmap(gradients)(grad_output, *stacked)
        for i in range(3):
            right = gradients(grad_output[i], *(tensor[i] for tensor in stacked))
            for a, b in zip(given, right, strict=True):
                torch.testing.assert_close(a[i], b, rtol=1e-5, atol=1e-6)

    def test_autocast_lowers_the_value_only(self):
        value, sides, locations, weights, points, *_ = self.arguments()
        shapes = tuple(zip(sides[::2], sides[1::2], strict=True))
        with torch.autocast("cpu", dtype=torch.float16):
            output = ms_deform_attn_fused(value, shapes, points, locations, weights, kernel=TRITON)
        assert output.dtype == torch.float16
        expected = ms_deform_attn_fused(
            value.half(), shapes, points, locations, weights, kernel=KernelConfig("reference")
        )
        torch.testing.assert_close(output, expected, rtol=2e-3, atol=1e-3)
        (grad,) = torch.autograd.grad(output.float().sum(), value)
        assert grad.dtype == torch.float32

    def test_module(self):
        module = MSDeformAttn(16, num_levels=2, num_heads=2, num_points=2, kernel=TRITON)
        twin = MSDeformAttn(16, num_levels=2, num_heads=2, num_points=2, kernel=KernelConfig("reference"))
        twin.load_state_dict(module.state_dict())
        inputs = (torch.randn(2, 5, 16), torch.rand(2, 5, 2, 4), torch.randn(2, 26, 16), ((4, 5), (2, 3)))
        torch.testing.assert_close(module(*inputs), twin(*inputs), rtol=1e-5, atol=1e-5)

    def test_compile_does_not_recompile_for_another_image_size(self):
        counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")

        @torch.compile(fullgraph=True, backend=counter)
        def step(value, shapes, points, offsets, logits):
            return ms_deform_attn_fused(value, shapes, points, offsets, logits, kernel=TRITON).square().sum()

        for H, W in ((4, 5), (6, 7), (8, 3)):
            case = Case(N=1, M=1, form=2, D=4, P=1, Lq=H * W, shapes=((H, W), (H // 2, W // 2)))
            value, shapes, offsets, logits, points, _ = random_problem(case, torch.float32)[0]
            value.requires_grad_()
            loss = step(value, shapes, points, offsets, logits)
            loss.backward()
            expected = ms_deform_attn_fused(value, shapes, points, offsets, logits, kernel=TRITON).square().sum()
            torch.testing.assert_close(loss, expected)
        # one with the first sizes, one with any
        assert counter.frame_count <= 2

    def test_export(self):
        class Model(torch.nn.Module):
            def forward(self, value, points, offsets, logits):
                return ms_deform_attn_fused(value, ((4, 5), (2, 3)), points, offsets, logits, kernel=TRITON)

        value, _, offsets, logits, points, *_ = (
            tensor.detach() if isinstance(tensor, torch.Tensor) else tensor for tensor in self.arguments()
        )
        program = torch.export.export(Model(), (value, points, offsets, logits))
        assert any("msda.attend" in str(node.target) for node in program.graph.nodes)
        expected = Model()(value, points, offsets, logits)
        torch.testing.assert_close(program.module()(value, points, offsets, logits), expected)
