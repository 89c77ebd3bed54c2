// An experiment: the value gradient by global atomics and nothing else, one group of lanes a (query, head).

#pragma once

#include "inputs.cuh"
#include "points.cuh"

namespace findings {

// The loop of a GPU without the atomic: read, add, and swap if nobody was faster. 16-bit dtypes in pairs.
__device__ __forceinline__ void add_by_swap(float* pointer, const float (&x)[4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        unsigned* word = reinterpret_cast<unsigned*>(pointer + i);
        unsigned found = __ldcg(word), expected;
        do {
            expected = found;
            found = atomicCAS(word, expected, __float_as_uint(__uint_as_float(expected) + x[i]));
        } while (found != expected);
    }
}

template <typename T>
__device__ __forceinline__ void add_by_swap(T* pointer, const float (&x)[4]) {
#pragma unroll
    for (int i = 0; i < 4; i += 2) {
        unsigned* word = reinterpret_cast<unsigned*>(pointer + i);
        unsigned found = __ldcg(word), expected;
        do {
            expected = found;
            const float2 both = msda::unpack(expected, T());
            found = atomicCAS(word, expected, msda::pack(both.x + x[i], both.y + x[i + 1], T()));
        } while (found != expected);
    }
}

// kSwap: the loop above in place of the hardware's reduction. kPair: twice the lanes, of which each half takes one of two
// corners side by side, so that an instruction of a group covers both. kStaggered: each query begins with another point.
template <
    typename TValue, typename TSum, bool kSwap, bool kHeadMajor, bool kPair, bool kPadded, bool kStaggered>
__global__ void __launch_bounds__(256) add_points(const __grid_constant__ Arguments args) {
    constexpr int kVector = 4, kRowLanes = kD / kVector, kLanes = kPair ? 2 * kRowLanes : kRowLanes;
    __shared__ Map maps[msda::kMaxLevels];
    load_maps<kPadded>(args, maps);
    __syncthreads();

    const msda::BlockIndex block = msda::block_index<1>(args);
    const int P = args.tiles_x, num_points = args.num_levels * P;
    const int lane = threadIdx.x % kLanes, half = lane / kRowLanes, channel = lane % kRowLanes * kVector;
    const int begin = block.chunk * args.chunk, end = min(begin + args.chunk, args.Lq);
    TSum* sums = static_cast<TSum*>(args.grad_value) + channel;
    for (int q = begin + threadIdx.x / kLanes; q < end; q += blockDim.x / kLanes) {
        const int64 row = (static_cast<int64>(block.n) * args.Lq + q) * args.M + block.m;
        float grad[kVector];
        msda::Vector<TValue, kVector>::load(static_cast<const TValue*>(args.grad_output) + row * kD + channel, grad);
        const int first = kStaggered ? q % num_points : 0;
        for (int i = 0; i < num_points; ++i) {
            const int j = first + i < num_points ? first + i : first + i - num_points;
            const Map map = maps[j / P];
            const Point point = load_point<TValue>(args, row, j, num_points, map);
            if (!point.inside) continue;
#pragma unroll
            for (int k = 0; k < (kPair ? 2 : 4); ++k) {
                const Corner corner = corner_of<kPadded>(point, map, kPair ? half : k % 2, kPair ? k : k / 2);
                if (!corner.valid || corner.weight == 0.f) continue;
                float addend[kVector];
#pragma unroll
                for (int c = 0; c < kVector; ++c) addend[c] = corner.weight * grad[c];
                TSum* place = sums + row_offset<kHeadMajor>(args, block.n, block.m, corner.cell);
                if constexpr (kSwap) {
                    add_by_swap(place, addend);
                } else {
                    msda::add(place, addend, 0.f);
                }
            }
        }
    }
}

}  // namespace findings
