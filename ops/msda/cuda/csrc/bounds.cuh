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

// This warp's share of the bounds: max |grad_output| of a query times its largest sum of weights on one level.
template <typename TValue, typename TLocation, typename TWeight, int kForm, int kP, int kWarps>
__device__ __forceinline__ Bounds warp_bounds(
    const Arguments& args, const BlockIndex& block, const QueryList& list
) {
    const int lane = threadIdx.x % 8, num_points = args.num_levels * kP;
    Bounds bounds = {0.f, 0.f, 0.f};
    for (int base = 0; base < list.count; base += kWarps * 4) {
        const int index = base + static_cast<int>(threadIdx.x) / 8;
        const int q = list[min(index, list.count - 1)];
        const Query<TLocation, TWeight, kP, kForm, 8> query(args, block.n, q, block.m, true, lane);
        const TValue* grad = static_cast<const TValue*>(args.grad_output) + query.row * kRow + lane * 4;
        unsigned bits = magnitude_bits(load_four(grad));
        float four = 0.f, one = 0.f;
        for (int first = 0; first < num_points; first += 8) {
            const float weight = first + lane < num_points ? fabsf(query.weight(first + lane)) : 0.f;
            const float pair = weight + __shfl_xor_sync(kFullWarp, weight, 1);
            const float sum = pair + __shfl_xor_sync(kFullWarp, pair, 2);
            // not fmaxf, which would drop a NaN
            if (!(sum <= four)) four = sum;
            one = fmaxf(one, weight);
        }
#pragma unroll
        for (int step = 4; step > 0; step /= 2) {
            bits = max(bits, __shfl_xor_sync(kFullWarp, bits, step));
            one = fmaxf(one, __shfl_xor_sync(kFullWarp, one, step));
        }
        const float other = __shfl_xor_sync(kFullWarp, four, 4);
        if (!(other <= four)) four = other;
        if (index < list.count) {
            bounds.sum = fmaf(__uint_as_float(bits), four * (kP / 4), bounds.sum);
            bounds.largest = fmaxf(bounds.largest, __uint_as_float(bits) * one);
            bounds.gradient = fmaxf(bounds.gradient, __uint_as_float(bits));
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
