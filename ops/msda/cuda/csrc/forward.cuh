// MSDA forward: a group of lanes a (query, head), each lane `kVector` channels wide.
//
// Rows of one head all lie in the same part of their 128-byte lines, so loading several of them meets in the banks of
// the L1: one wavefront a row, however short. A warp that takes neighbouring heads together (`kHeads` of them) fills
// the line, and a 64-byte row costs half.

#pragma once

#include "inputs.cuh"

namespace msda {

template <
    typename TValue, typename TLocation, typename TWeight, int kForm, int kP, int kD, int kVector, int kLanes,
    int kHeads, int kWarps, int kUnroll, int kMinBlocks>
__global__ void __launch_bounds__(kWarps * 32, kMinBlocks) forward(const __grid_constant__ Arguments args) {
    constexpr int kQueries = 32 / kLanes / kHeads;
    constexpr int kRepeats = (kD + kVector * kLanes - 1) / (kVector * kLanes);
    typedef Vector<TValue, kVector> Channels;
    typedef SampleBoard<kLanes> Board;
    __shared__ Level levels[kMaxLevels];
    __shared__ Board boards[kWarps];

    const BlockIndex block = block_index<kHeads>(args);
    load_levels(args, block.n, levels);
    __syncthreads();

    const int warp = threadIdx.x / 32, group = threadIdx.x % 32 / kLanes, lane = threadIdx.x % kLanes;
    const int q = block.chunk * args.chunk + warp * kQueries + group / kHeads, m = block.m + group % kHeads;
    const bool active = q < args.Lq;
    const Query<TLocation, TWeight, kP, kForm, kLanes> query(args, block.n, active ? q : 0, m, active, lane);
    Board& board = boards[warp];

    const int64 first_row = static_cast<int64>(block.n) * args.S * args.M + m;
    const TValue* value = static_cast<const TValue*>(args.value) + first_row * kD + lane * kVector;
    const int num_points = args.num_levels * kP;
    float sum[kRepeats][kVector] = {};
    for (int first = 0; first < num_points; first += kLanes) {
        const int j = first + lane;
        const bool present = active && j < num_points;
        Sample sample = outside_sample();
        if (present) sample = query.sample(query.fetch(j, true), j / kP, levels[j / kP]);
        __syncwarp();
        board.weights[Board::slot(lane, group)] = corner_weights(sample);
        board.rows[Board::slot(lane, group)] = cell_rows(sample.cells, args.M);
        __syncwarp();
#pragma unroll kUnroll
        for (int i = 0; i < kLanes; ++i) {
            const float4 weights4 = board.weights[Board::slot(i, group)];
            const int4 rows4 = board.rows[Board::slot(i, group)];
            const float weights[4] = {weights4.x, weights4.y, weights4.z, weights4.w};
            const int rows[4] = {rows4.x, rows4.y, rows4.z, rows4.w};
            typename Channels::raw corners[4][kRepeats];
#pragma unroll
            for (int k = 0; k < 4; ++k) {
                const TValue* row = row_pointer<kD>(value, rows[k]);
#pragma unroll
                for (int r = 0; r < kRepeats; ++r) {
                    if ((r + 1) * kVector * kLanes <= kD) {
                        corners[k][r] = Channels::load_raw(row + r * kVector * kLanes);
                    } else {
                        corners[k][r] = typename Channels::raw();
                        if ((r * kLanes + lane) * kVector < kD) {
                            corners[k][r] = Channels::load_raw(row + r * kVector * kLanes);
                        }
                    }
                }
            }
#pragma unroll
            for (int k = 0; k < 4; ++k) {
#pragma unroll
                for (int r = 0; r < kRepeats; ++r) {
                    float x[kVector];
                    Channels::convert(corners[k][r], x);
#pragma unroll
                    for (int c = 0; c < kVector; ++c) sum[r][c] = fmaf(weights[k], x[c], sum[r][c]);
                }
            }
        }
    }
    if (!active) return;
    TValue* output = static_cast<TValue*>(args.output) + query.row * kD + lane * kVector;
#pragma unroll
    for (int r = 0; r < kRepeats; ++r) {
        if ((r * kLanes + lane) * kVector < kD) Channels::store(output + r * kVector * kLanes, sum[r]);
    }
}

}  // namespace msda
