// The value gradient for D = 32 of a few queries, such as a decoder's: written once, without atomics in global memory.
//
// A block takes one head of one image and some cells of one level. It lists by cell the corners of samples that lie in
// them (a counting sort in shared memory), sums each cell's corners in registers and writes the row, in the dtype of
// the value and zeros included: there is neither a buffer of sums to clear nor one to convert. Corners of a cell come
// in any order, so three and more are summed as 64-bit fixed point: the result is the same in every run.

#pragma once

#include "bounds.cuh"

namespace msda {

// A corner of a sample: its weight and its query.
struct __align__(8) Corner {
    float weight;
    int query;
};

// `visit(local cell, weight, query)` for each corner on the map whose cell is one of `count` from `first` on; cells
// are counted in the level. 4 lanes a query.
template <typename TLocation, typename TWeight, int kForm, int kP, int kWarps, typename TVisit>
__device__ __forceinline__ void visit_corners(
    const Arguments& args, const BlockIndex& block, int level_index, const Level& level, int first, int count,
    const TVisit& visit
) {
    const int group = threadIdx.x / 4, lane = threadIdx.x % 4;
    for (int base = 0; base < args.Lq; base += kWarps * 8) {
        const int q = base + group;
        const bool active = q < args.Lq;
        const Query<TLocation, TWeight, kP, kForm, 4> query(args, block.n, active ? q : 0, block.m, active, lane);
        if (!active) continue;
#pragma unroll
        for (int point = 0; point < kP; point += 4) {
            const Fetched fetched = query.fetch(level_index * kP + point + lane, true);
            const Sample sample = query.sample(fetched, level_index, level);
            const float4 weights = corner_weights(sample);
            const int cells[4] = {sample.cells.x, sample.cells.y, sample.cells.z, sample.cells.w};
            const float all_weights[4] = {weights.x, weights.y, weights.z, weights.w};
#pragma unroll
            for (int k = 0; k < 4; ++k) {
                const int local = cells[k] - level.start - first;
                if ((sample.valid >> k & 1) && local >= 0 && local < count) visit(local, all_weights[k], q);
            }
        }
    }
    __syncthreads();
}

// Each of `counts` becomes the sum of those before it.
template <int kWarps>
__device__ __forceinline__ void exclusive_sums(int* counts, int num, int (&warp_totals)[kWarps]) {
    // an odd stretch a thread, so that they do not meet in a bank
    const int stretch = (num + kWarps * 32 - 1) / (kWarps * 32) | 1, lane = threadIdx.x % 32;
    const int begin = threadIdx.x * stretch, end = min(begin + stretch, num);
    int own = 0;
    for (int i = begin; i < end; ++i) own += counts[i];
    int sum = own;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
        const int other = __shfl_up_sync(kFullWarp, sum, step);
        if (lane >= step) sum += other;
    }
    if (lane == 31) warp_totals[threadIdx.x / 32] = sum;
    __syncthreads();
    int before = sum - own;
    for (int w = 0; w < static_cast<int>(threadIdx.x) / 32; ++w) before += warp_totals[w];
    for (int i = begin; i < end; ++i) {
        const int count = counts[i];
        counts[i] = before;
        before += count;
    }
    __syncthreads();
}

template <typename TValue, typename TLocation, typename TWeight, int kForm, int kP, int kWarps, int kMinBlocks>
__global__ void __launch_bounds__(kWarps * 32, kMinBlocks) collect32(const __grid_constant__ Arguments args) {
    static_assert(kP % 4 == 0, "4 lanes take 4 points of one level");
    __shared__ Level levels[kMaxLevels];
    __shared__ unsigned largest_gradient, largest_weight;
    __shared__ int warp_totals[kWarps];
    extern __shared__ __align__(16) Corner corners[];

    const BlockIndex block = block_index<1>(args);
    load_levels(args, block.n, levels);
    if (threadIdx.x == 0) largest_gradient = largest_weight = 0;
    __syncthreads();

    // the level, and which of its cells
    int level_index = 0, part = block.chunk, num_cells, num_parts;
    for (;; ++level_index) {
        num_cells = levels[level_index].H * levels[level_index].W;
        num_parts = max((num_cells + args.chunk - 1) / args.chunk, min(args.max_cells, num_cells));
        if (part < num_parts) break;
        part -= num_parts;
    }
    const Level level = levels[level_index];
    const int first = static_cast<int64>(num_cells) * part / num_parts;
    const int count = static_cast<int64>(num_cells) * (part + 1) / num_parts - first;

    // a list of corners by cell; at last `ends` holds where each cell's corners end
    int* ends = reinterpret_cast<int*>(corners + args.Lq * kP * 4);
    for (int i = threadIdx.x; i < count; i += kWarps * 32) ends[i] = 0;
    __syncthreads();
    unsigned heaviest = 0;
    visit_corners<TLocation, TWeight, kForm, kP, kWarps>(
        args, block, level_index, level, first, count,
        [&](int cell, float weight, int) {
            atomicAdd(ends + cell, 1);
            // as bits, where NaN is larger than any number
            heaviest = max(heaviest, __float_as_uint(fabsf(weight)));
        }
    );
    exclusive_sums<kWarps>(ends, count, warp_totals);
    visit_corners<TLocation, TWeight, kForm, kP, kWarps>(
        args, block, level_index, level, first, count,
        [&](int cell, float weight, int q) { corners[atomicAdd(ends + cell, 1)] = Corner{weight, q}; }
    );

    const int octet = threadIdx.x / 8, lane = threadIdx.x % 8;
    const int64 head_rows = static_cast<int64>(block.n) * args.Lq * args.M + block.m;
    const TValue* grad_output = static_cast<const TValue*>(args.grad_output) + head_rows * kRow + lane * 4;
    unsigned bits = 0;
    for (int q = octet; q < args.Lq; q += kWarps * 4) {
        bits = max(bits, magnitude_bits(load_four(row_pointer<kRow>(grad_output, q * args.M))));
    }
    atomicMax(&largest_gradient, __reduce_max_sync(kFullWarp, bits));
    atomicMax(&largest_weight, __reduce_max_sync(kFullWarp, heaviest));
    __syncthreads();
    // no sum of corners reaches 2^62
    const float addend = __uint_as_float(largest_gradient) * __uint_as_float(largest_weight);
    const float bound = addend * (args.Lq * kP * 4.f);
    const bool is_fixed = bound > 0.f && bound <= 3.0e38f;
    const int exponent = is_fixed ? min(max(60 - ilogbf(bound), -126), 126) : 0;
    const float scale = ldexpf(1.f, exponent), inverse = ldexpf(1.f, -exponent);

    TValue* grad_value =
        static_cast<TValue*>(args.grad_value) +
        ((static_cast<int64>(block.n) * args.S + level.start + first) * args.M + block.m) * kRow + lane * 4;
    for (int cell = octet; cell < count; cell += kWarps * 4) {
        const int begin = cell == 0 ? 0 : ends[cell - 1], end = ends[cell];
        float sums[4] = {};
        if (end - begin <= 2 || !is_fixed) {
            // two numbers have the same sum in either order, if nothing is fused
            for (int i = begin; i < end; ++i) {
                const Corner corner = corners[i];
                const float4 grad = load_four(row_pointer<kRow>(grad_output, corner.query * args.M));
                sums[0] = __fadd_rn(sums[0], __fmul_rn(corner.weight, grad.x));
                sums[1] = __fadd_rn(sums[1], __fmul_rn(corner.weight, grad.y));
                sums[2] = __fadd_rn(sums[2], __fmul_rn(corner.weight, grad.z));
                sums[3] = __fadd_rn(sums[3], __fmul_rn(corner.weight, grad.w));
            }
        } else {
            int64 fixed[4] = {};
#pragma unroll 4
            for (int i = begin; i < end; ++i) {
                const Corner corner = corners[i];
                const float4 grad = load_four(row_pointer<kRow>(grad_output, corner.query * args.M));
                fixed[0] += __float2ll_rn(corner.weight * grad.x * scale);
                fixed[1] += __float2ll_rn(corner.weight * grad.y * scale);
                fixed[2] += __float2ll_rn(corner.weight * grad.z * scale);
                fixed[3] += __float2ll_rn(corner.weight * grad.w * scale);
            }
#pragma unroll
            for (int c = 0; c < 4; ++c) sums[c] = __ll2float_rn(fixed[c]) * inverse;
        }
        Vector<TValue, 4>::store(row_pointer<kRow>(grad_value, cell * args.M), sums);
    }
}

}  // namespace msda
