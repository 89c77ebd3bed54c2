// An experiment: the forward pass with techniques that can be switched on one by one.

#pragma once

#include "inputs.cuh"
#include "points.cuh"

namespace findings {

// kPair: see add_points.cuh; here the halves meet in one exchange at the end of a query. kStaged: the coarsest levels of
// the head are copied to shared memory first.
template <typename TValue, bool kHeadMajor, bool kPair, bool kPadded, bool kStaged>
__global__ void __launch_bounds__(512) gather_points(const __grid_constant__ Arguments args) {
    constexpr int kVector = 16 / sizeof(TValue), kRowLanes = kD / kVector, kLanes = kPair ? 2 * kRowLanes : kRowLanes;
    typedef msda::Vector<TValue, kVector> Channels;
    __shared__ Map maps[msda::kMaxLevels];
    extern __shared__ uint4 stage[];
    load_maps<kPadded>(args, maps);
    __syncthreads();

    const msda::BlockIndex block = msda::block_index<1>(args);
    const int P = args.tiles_x, num_points = args.num_levels * P;
    const int group = threadIdx.x / kLanes, lane = threadIdx.x % kLanes;
    const int half = lane / kRowLanes, part = lane % kRowLanes;
    const TValue* value = static_cast<const TValue*>(args.value);
    const int staged_cell = kStaged ? maps[args.tiles_y].start : 0;
    if constexpr (kStaged) {
        for (int i = threadIdx.x; i < args.max_cells * kRowLanes; i += blockDim.x) {
            const int64 offset = row_offset<kHeadMajor>(args, block.n, block.m, staged_cell + i / kRowLanes);
            stage[i] = Channels::load_raw(value + offset + i % kRowLanes * kVector);
        }
        __syncthreads();
    }
    const int begin = block.chunk * args.chunk, end = min(begin + args.chunk, args.Lq);
    // all threads go through the loop together: the exchange below is for whole warps
    for (int base = begin; base < end; base += blockDim.x / kLanes) {
        const int q = base + group;
        const int64 row = (static_cast<int64>(block.n) * args.Lq + q) * args.M + block.m;
        float sum[kVector] = {};
        for (int j = 0; j < num_points; ++j) {
            if (q >= end) break;
            const int level = j / P;
            const Map map = maps[level];
            const Point point = load_point<TValue>(args, row, j, num_points, map);
            if (!point.inside) continue;
#pragma unroll
            for (int k = 0; k < (kPair ? 2 : 4); ++k) {
                const Corner corner = corner_of<kPadded>(point, map, kPair ? half : k % 2, kPair ? k : k / 2);
                if (!corner.valid) continue;
                uint4 raw;
                if (kStaged && level >= args.tiles_y) {
                    raw = stage[(corner.cell - staged_cell) * kRowLanes + part];
                } else {
                    const int64 offset = row_offset<kHeadMajor>(args, block.n, block.m, corner.cell);
                    raw = Channels::load_raw(value + offset + part * kVector);
                }
                float x[kVector];
                Channels::convert(raw, x);
#pragma unroll
                for (int c = 0; c < kVector; ++c) sum[c] = fmaf(corner.weight, x[c], sum[c]);
            }
        }
        if constexpr (kPair) {
#pragma unroll
            for (int c = 0; c < kVector; ++c) sum[c] += __shfl_xor_sync(msda::kFullWarp, sum[c], kRowLanes);
        }
        if (q < end && half == 0) {
            Channels::store(static_cast<TValue*>(args.output) + row * kD + part * kVector, sum);
        }
    }
}

}  // namespace findings
