// The value gradient for D = 32 without waiting for global atomics.
//
// A block takes one head of one image and the queries of one tile of the maps (or a chunk of them), looks where their
// samples fall, and keeps a window of each level in shared memory as 32-bit fixed point: integer adds there are four
// times faster than reductions in the L2, and give the same sum in any order. Samples outside the windows go to global
// memory, so that the result is right wherever they are, and each window is added to global memory once at the end.

#pragma once

#include "bounds.cuh"
#include "gradients.cuh"

namespace msda {

// ---- adding

__device__ __forceinline__ void add_shared(unsigned address, int x) {
    asm volatile("red.shared.add.s32 [%0], %1;" ::"r"(address), "r"(x) : "memory");
}

// 4 channels of one corner; see `cell_turn` for the order of the runs
template <bool kAllBits>
__device__ __forceinline__ void add_private(unsigned address, float weight, float4 grad) {
    add_shared(address, round_to_int<kAllBits>(weight, grad.x));
    add_shared(address ^ 32, round_to_int<kAllBits>(weight, grad.y));
    add_shared(address ^ 64, round_to_int<kAllBits>(weight, grad.z));
    add_shared(address ^ 96, round_to_int<kAllBits>(weight, grad.w));
}

// The channels of a cell are stored in 4 runs of 8 words; the run is turned by the parity of the cell, so that the
// 4 corners of a sample, added in one instruction, never share a bank.
__device__ __forceinline__ int cell_turn(int x, int y) { return (x & 1) + 2 * (y & 1); }

// Which 4 channels of a row a lane of an octet has: neighbours, for one 16-byte reduction; or every eighth, so that
// 64-bit reductions, which come one a lane, cover whole sectors as well.
template <typename TSum>
struct LaneChannels {
    static constexpr bool kStrided = sizeof(TSum) == 8;
    static constexpr int kFirst = kStrided ? 1 : 4, kStep = kStrided ? 8 : 1;

    static __device__ __forceinline__ void add_row(TSum* pointer, const float (&x)[4], float scale) {
        if constexpr (kStrided) {
#pragma unroll
            for (int t = 0; t < 4; ++t) {
                const float one[1] = {x[t]};
                add(pointer + t * kStep, one, scale);
            }
        } else {
            add(pointer, x, scale);
        }
    }
};

// ---- the kernel

// A corner's weight and where it goes: bytes into the sums, or ~row of the global gradient.
struct __align__(8) Addend {
    float weight;
    int target;
};

struct WarpSpace {
    Addend addends[32][4];  // [query * 4 + point][corner]
    float grads[8][8][4];   // grad_output of 8 queries in fixed-point units, 4 channels a lane of an octet
};

template <
    typename TValue, typename TSum, typename TLocation, typename TWeight, int kForm, int kP, int kWarps,
    int kMinBlocks>
__global__ void __launch_bounds__(kWarps * 32, kMinBlocks) scatter32(const __grid_constant__ Arguments args) {
    static_assert(kP % 4 == 0, "4 points lie in one level");
    __shared__ Level levels[kMaxLevels];
    __shared__ Window attempted[kAttempts][kMaxLevels];
    __shared__ Moments moments[kMaxLevels];
    __shared__ Bounds all_bounds[kWarps];
    __shared__ QuerySet set;
    __shared__ Bounds block_bounds;
    __shared__ FixedPoint shared_fixed;
    __shared__ unsigned fullest;
    __shared__ int choice, num_private;
    extern __shared__ __align__(128) int4 dynamic_space[];

    const BlockIndex block = block_index<1>(args);
    load_levels(args, block.n, levels);
    __syncthreads();
    make_query_set(args, levels, block.chunk, set);
    WarpSpace* warp_spaces = reinterpret_cast<WarpSpace*>(dynamic_space);
    int* sums = reinterpret_cast<int*>(warp_spaces + kWarps);
    const QueryList list = list_queries(args, levels, set, sums + args.max_cells * kRow);
    __syncthreads();

    // dynamic shared memory: a space a warp, the sums, the list of queries; the moments come before the sums and share
    // their place
    if (args.max_cells > 0) {
        Moments* partials = reinterpret_cast<Moments*>(sums);
        collect_moments<TLocation, TWeight, kForm, kP, kWarps>(args, block, levels, list, partials);
        const Bounds bounds =
            warp_bounds<TValue, TLocation, TWeight, kForm, kP, kWarps>(args, block, list);
        if (threadIdx.x % 32 == 0) all_bounds[threadIdx.x / 32] = bounds;
        __syncthreads();
        if (threadIdx.x < args.num_levels) {
            moments[threadIdx.x] = level_moments<kP, kWarps>(args, partials, threadIdx.x);
        }
        __syncthreads();
        desire_windows(args, levels, moments, attempted);
        __syncthreads();
        if (threadIdx.x < 32) {
            int cells = 0;
            if (threadIdx.x < kAttempts) {
                cells = try_windows(args, moments, threadIdx.x, attempted[threadIdx.x]);
            }
            const bool fits = threadIdx.x < kAttempts && cells <= args.max_cells;
            const int first_fit = __ffs(__ballot_sync(kFullWarp, fits)) - 1;
            if (threadIdx.x == first_fit) {
                choice = first_fit;
                num_private = cells;
            }
        } else if (threadIdx.x == 32) {
            Bounds total = {0.f, 0.f, 0.f};
            for (int w = 0; w < kWarps; ++w) {
                total.sum += all_bounds[w].sum;
                total.largest = fmaxf(total.largest, all_bounds[w].largest);
                total.gradient = fmaxf(total.gradient, all_bounds[w].gradient);
            }
            block_bounds = total;
            const int max_exponent = kTight<TValue> ? 126 : 22 - (ilogbf(total.largest) + 1);
            shared_fixed = fixed_point(total.sum, total.gradient, max_exponent);
        }
    } else if (threadIdx.x == 0) {
        for (int l = 0; l < args.num_levels; ++l) attempted[0][l] = Window{0, 0, 0, 0, 0};
        choice = num_private = 0;
        shared_fixed = FixedPoint{1.f, 1.f};
    }
    __syncthreads();
    const Window* windows = attempted[choice];
    if (kTight<TValue> && num_private > 0 && shared_fixed.scale != 0.f) {
        // the spaces of the warps are free until the main loop, and hold more words than there are cells
        unsigned* totals = reinterpret_cast<unsigned*>(warp_spaces);
        for (int i = threadIdx.x; i < num_private; i += kWarps * 32) totals[i] = 0;
        if (threadIdx.x == 0) fullest = 0;
        __syncthreads();
        total_magnitudes<TValue, TLocation, TWeight, kForm, kP, kWarps>(
            args, block, levels, list, windows, shared_fixed.scale, totals
        );
        __syncthreads();
        unsigned most = 0;
        for (int i = threadIdx.x; i < num_private; i += kWarps * 32) most = max(most, totals[i]);
        atomicMax(&fullest, __reduce_max_sync(kFullWarp, most));
        __syncthreads();
        if (threadIdx.x == 0) {
            shared_fixed = fixed_point(fullest * shared_fixed.inverse, block_bounds.gradient, 126);
        }
        __syncthreads();
    }
    const FixedPoint fixed = shared_fixed;
    for (int i = threadIdx.x; i < num_private * 8; i += kWarps * 32) {
        reinterpret_cast<int4*>(sums)[i] = make_int4(0, 0, 0, 0);
    }
    __syncthreads();

    const int warp = threadIdx.x / 32, group = threadIdx.x % 32 / 4, lane = threadIdx.x % 4;
    const int octet = threadIdx.x % 32 / 8, octet_lane = threadIdx.x % 8;
    const unsigned sums_address = static_cast<unsigned>(__cvta_generic_to_shared(sums)) + octet_lane * 4;
    WarpSpace& space = warp_spaces[warp];
    const int num_points = args.num_levels * kP;
    const int64 first_row = static_cast<int64>(block.n) * args.S * args.M + block.m;
    typedef LaneChannels<TSum> Lanes;
    TSum* grad_value = static_cast<TSum*>(args.grad_value) + first_row * kRow + octet_lane * Lanes::kFirst;
    const float global_scale = args.scales == nullptr ? 0.f : args.scales[0];

    for (int first = warp * 8; first < list.count; first += kWarps * 8) {
        const bool active = first + group < list.count;
        const int q = list[active ? first + group : 0];
        const Query<TLocation, TWeight, kP, kForm, 4> query(args, block.n, q, block.m, active, lane);
        {
            float4 grads[2] = {};
            if (active) {
                const TValue* grad = static_cast<const TValue*>(args.grad_output) + query.row * kRow + lane * 8;
                grads[0] = load_four(grad);
                grads[1] = load_four(grad + 4);
            }
            __syncwarp();
            const float scaled[8] = {grads[0].x, grads[0].y, grads[0].z, grads[0].w,
                                     grads[1].x, grads[1].y, grads[1].z, grads[1].w};
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                const int channel = lane * 8 + i;
                const int owner = Lanes::kStrided ? channel % 8 : channel / 4;
                space.grads[group][owner][Lanes::kStrided ? channel / 8 : channel % 4] = scaled[i] * fixed.scale;
            }
        }
        Fetched fetched = query.fetch(lane, active);
        for (int start = 0; start < num_points; start += 4) {
            const int level_index = start / kP;
            const Level level = levels[level_index];
            const Window window = windows[level_index];
            Sample sample = outside_sample();
            if (active) sample = query.sample(fetched, level_index, level);
            fetched = query.fetch(start + 4 + lane, active && start + 4 < num_points);

            const Place place = place_in(sample, level, window);
            // an outside sample adds zeros to the first cell
            int4 targets = make_int4(0, 0, 0, 0);
            if (place.is_private) {
                const int turn = cell_turn(sample.x0, sample.y0) * 32;
                targets.x = place.cells.x * 128 + turn;
                targets.y = place.cells.y * 128 + (turn ^ 32);
                targets.z = place.cells.z * 128 + (turn ^ 64);
                targets.w = place.cells.w * 128 + (turn ^ 96);
            } else if (sample.valid != 0) {
                targets = cell_rows(sample.cells, args.M);
                targets = make_int4(~targets.x, ~targets.y, ~targets.z, ~targets.w);
            }
            const float4 weights = corner_weights(sample);
            const bool all_private =
                num_private > 0 && __all_sync(kFullWarp, place.is_private || sample.valid == 0);
            __syncwarp();
            float4* addends = reinterpret_cast<float4*>(space.addends[threadIdx.x % 32]);
            addends[0] = make_float4(weights.x, __int_as_float(targets.x), weights.y, __int_as_float(targets.y));
            addends[1] = make_float4(weights.z, __int_as_float(targets.z), weights.w, __int_as_float(targets.w));
            __syncwarp();

            if (all_private) {
#pragma unroll 2
                for (int row = 0; row < 8; ++row) {
                    const float4 grad = *reinterpret_cast<const float4*>(space.grads[row][octet_lane]);
#pragma unroll
                    for (int i = 0; i < 4; ++i) {
                        const Addend addend = space.addends[row * 4 + i][octet];
                        add_private<kTight<TValue>>(sums_address + addend.target, addend.weight, grad);
                    }
                }
                continue;
            }
#pragma unroll 1
            for (int row = 0; row < 8; ++row) {
                const float4 grad = *reinterpret_cast<const float4*>(space.grads[row][octet_lane]);
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const Addend addend = space.addends[row * 4 + i][octet];
                    if (addend.weight == 0.f) continue;
                    if (addend.target >= 0) {
                        add_private<kTight<TValue>>(sums_address + addend.target, addend.weight, grad);
                    } else {
                        const float weight = addend.weight * fixed.inverse;
                        const float x[4] = {weight * grad.x, weight * grad.y, weight * grad.z, weight * grad.w};
                        Lanes::add_row(row_pointer<kRow>(grad_value, ~addend.target), x, global_scale);
                    }
                }
            }
        }
    }
    if (num_private == 0) return;
    __syncthreads();

    for (int l = 0; l < args.num_levels; ++l) {
        const Window window = windows[l];
        const int cells = window.width * window.height;
        const float inverse_width = 1.f / window.width;
        for (int cell = threadIdx.x / 8; cell < cells; cell += kWarps * 4) {
            // exact: half a cell is more than rounding takes
            const int row = static_cast<int>((cell + 0.5f) * inverse_width);
            const int x = window.x + cell - row * window.width, y = window.y + row;
            const int turn = cell_turn(x, y);
            float values[4];
            bool any = false;
#pragma unroll
            for (int t = 0; t < 4; ++t) {
                const int sum = sums[(window.base + cell) * kRow + (turn ^ t) * 8 + octet_lane];
                any |= sum != 0;
                values[t] = sum * fixed.inverse;
            }
            if (any || fixed.inverse != fixed.inverse) {
                const int row_index = (levels[l].start + y * levels[l].W + x) * args.M;
                Lanes::add_row(row_pointer<kRow>(grad_value, row_index), values, global_scale);
            }
        }
    }
}

}  // namespace msda
