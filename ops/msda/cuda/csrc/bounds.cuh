// 32-bit fixed point for sums in shared memory: bounds of what a block adds, and the scale that follows.

#pragma once

#include "windows.cuh"

namespace msda {

template <typename TValue>
__device__ __forceinline__ float4 load_four(const TValue* pointer) {
    float x[4];
    Vector<TValue, 4>::load(pointer, x);
    return make_float4(x[0], x[1], x[2], x[3]);
}

// as bits, where NaN is larger than any number
__device__ __forceinline__ unsigned magnitude_bits(float4 x) {
    const unsigned a = max(__float_as_uint(x.x) & 0x7fffffffu, __float_as_uint(x.y) & 0x7fffffffu);
    const unsigned b = max(__float_as_uint(x.z) & 0x7fffffffu, __float_as_uint(x.w) & 0x7fffffffu);
    return max(a, b);
}

struct Bounds {
    float sum;       // no cell can get more in total
    float largest;   // nor in one addend
    float gradient;  // max |grad_output|
};

// This warp's share of the bounds: max |grad_output| of a query times its largest sum of weights on one level. A softmax
// is taken for the 1 it cannot pass. Queries are read `kBatch` at a time, so that they wait for memory together.
template <typename TValue, typename TLocation, typename TWeight, int kForm, int kP, int kWarps>
__device__ __forceinline__ Bounds warp_bounds(const Arguments& args, const BlockIndex& block, const QueryList& list) {
    constexpr int kBatch = 4;
    const int lane = threadIdx.x % 8, octet = threadIdx.x / 8, num_points = args.num_levels * kP;
    Bounds bounds = {0.f, 0.f, 0.f};
    for (int base = 0; base < list.count; base += kWarps * 4 * kBatch) {
        unsigned bits[kBatch];
        float four[kBatch], one[kBatch];
        const TWeight* weights[kBatch];
#pragma unroll
        for (int b = 0; b < kBatch; ++b) {
            const int q = list[min(base + b * kWarps * 4 + octet, list.count - 1)];
            const Query<TLocation, TWeight, kP, kForm, 8> query(args, block.n, q, block.m, true);
            const TValue* grad = static_cast<const TValue*>(args.grad_output) + query.row * kRow + lane * 4;
            bits[b] = magnitude_bits(load_four(grad));
            four[b] = one[b] = kForm == 0 ? 0.f : 1.f;
            weights[b] = query.weights;
        }
        for (int first = 0; first < num_points; first += 8) {
            const bool present = first + lane < num_points;
            float weight[kBatch];
#pragma unroll
            for (int b = 0; b < kBatch; ++b) weight[b] = present ? to_float(weights[b][first + lane]) : 0.f;
#pragma unroll
            for (int b = 0; b < kBatch; ++b) {
                if constexpr (kForm == 0) {
                    const float magnitude = fabsf(weight[b]);
                    const float pair = magnitude + __shfl_xor_sync(kFullWarp, magnitude, 1);
                    const float sum = pair + __shfl_xor_sync(kFullWarp, pair, 2);
                    // not fmaxf, which would drop a NaN
                    if (!(sum <= four[b])) four[b] = sum;
                    one[b] = fmaxf(one[b], magnitude);
                } else if (!(weight[b] <= 3.0e38f)) {
                    // the softmax of such a logit is NaN
                    bits[b] = 0x7fffffffu;
                }
            }
        }
#pragma unroll
        for (int b = 0; b < kBatch; ++b) {
#pragma unroll
            for (int step = 4; step > 0; step /= 2) bits[b] = max(bits[b], __shfl_xor_sync(kFullWarp, bits[b], step));
            if constexpr (kForm == 0) {
#pragma unroll
                for (int step = 4; step > 0; step /= 2) {
                    one[b] = fmaxf(one[b], __shfl_xor_sync(kFullWarp, one[b], step));
                }
                const float other = __shfl_xor_sync(kFullWarp, four[b], 4);
                if (!(other <= four[b])) four[b] = other;
                four[b] *= kP / 4;
            }
            if (base + b * kWarps * 4 + octet < list.count) {
                const float gradient = __uint_as_float(bits[b]);
                bounds.sum = fmaf(gradient, four[b], bounds.sum);
                bounds.largest = fmaxf(bounds.largest, gradient * one[b]);
                bounds.gradient = fmaxf(bounds.gradient, gradient);
            }
        }
    }
    __syncwarp();
#pragma unroll
    for (int step = 8; step < 32; step *= 2) {
        bounds.sum += __shfl_xor_sync(kFullWarp, bounds.sum, step);
        bounds.largest = fmaxf(bounds.largest, __shfl_xor_sync(kFullWarp, bounds.largest, step));
        bounds.gradient = fmaxf(bounds.gradient, __shfl_xor_sync(kFullWarp, bounds.gradient, step));
    }
    return bounds;
}

struct FixedPoint {
    float scale, inverse;
};

// 16-bit values take the bounds of the whole block, and addends of 22 bits. float32 has more digits to keep: it looks
// up what the fullest cell can get, and uses all 31 bits.
template <typename TValue>
constexpr bool kTight = sizeof(TValue) == 4;

// A power of two such that nothing up to `sum` overflows 30 bits. A gradient that is not finite makes all that the
// block touches NaN, so that loss scaling notices.
__device__ __forceinline__ FixedPoint fixed_point(float sum, float gradient, int max_exponent) {
    if (!(sum <= 3.0e38f)) return FixedPoint{0.f, __int_as_float(0x7fffffff)};
    if (sum == 0.f) return FixedPoint{0.f, 0.f};
    // grad_output itself must survive the scaling
    const int exponent = min(min(30 - (ilogbf(sum) + 1), max_exponent), min(120 - ilogbf(gradient), 126));
    return FixedPoint{ldexpf(1.f, exponent), ldexpf(1.f, -exponent)};
}

template <bool kAllBits>
__device__ __forceinline__ int round_to_int(float weight, float x) {
    if constexpr (kAllBits) return __float2int_rn(weight * x);
    // for |x| <= 2^22: adding 1.5 * 2^23 leaves the nearest integer in the low bits
    return __float_as_int(fmaf(weight, x, 12582912.f)) - 0x4B400000;
}

// For each private cell the sum of |weight| * max |grad_output| that it gets, times `scale`, rounded up.
template <typename TValue, typename TLocation, typename TWeight, int kForm, int kP, int kWarps>
__device__ __forceinline__ void total_magnitudes(
    const Arguments& args, const BlockIndex& block, const Level* levels, const QueryList& list, const Window* windows,
    float scale, unsigned* totals
) {
    const int group = threadIdx.x / 4, lane = threadIdx.x % 4;
    for (int base = 0; base < list.count; base += kWarps * 8) {
        const bool active = base + group < list.count;
        const int q = list[active ? base + group : 0];
        const Query<TLocation, TWeight, kP, kForm, 4> query(args, block.n, q, block.m, active, lane);
        const TValue* grad = static_cast<const TValue*>(args.grad_output) + query.row * kRow + lane * 8;
        unsigned bits = max(magnitude_bits(load_four(grad)), magnitude_bits(load_four(grad + 4)));
        bits = max(bits, __shfl_xor_sync(kFullWarp, bits, 1));
        bits = max(bits, __shfl_xor_sync(kFullWarp, bits, 2));
        const float gradient = __uint_as_float(bits) * scale;
        for (int start = 0; start < args.num_levels * kP; start += 4) {
            const int level_index = start / kP;
            const Level level = levels[level_index];
            if (!active) continue;
            const Sample sample = query.sample(query.fetch(start + lane, true), level_index, level);
            const Place place = place_in(sample, level, windows[level_index]);
            if (!place.is_private || sample.valid == 0) continue;
            const float4 weights = corner_weights(sample);
            atomicAdd(totals + place.cells.x, __float2uint_ru(fabsf(weights.x) * gradient));
            atomicAdd(totals + place.cells.y, __float2uint_ru(fabsf(weights.y) * gradient));
            atomicAdd(totals + place.cells.z, __float2uint_ru(fabsf(weights.z) * gradient));
            atomicAdd(totals + place.cells.w, __float2uint_ru(fabsf(weights.w) * gradient));
        }
        __syncwarp();
    }
}

}  // namespace msda
