// MSDA forward: a group of lanes a (query, head), each lane `kVector` channels wide.
//
// Rows of one head all lie in the same part of their 128-byte lines, so loading several of them meets in the banks of
// the L1: one wavefront a row, however short. A warp that takes neighbouring heads together (`kHeads` of them) fills
// the line, and a 64-byte row costs half.
//
// With `kTiled` a large block goes through neighbouring tiles of an encoder's maps, so that what its warps read at a time
// fits in the L1. There is no state between queries: where samples are elsewhere, only the L1 gains nothing.

#pragma once

#include "inputs.cuh"
#include "queries.cuh"

namespace msda {

template <
    typename TValue, typename TLocation, typename TWeight, int kForm, int kP, int kD, int kVector, int kLanes,
    int kHeads, int kWarps, int kUnroll, int kMinBlocks, bool kTiled>
__global__ void __launch_bounds__(kWarps * 32, kMinBlocks) forward(const __grid_constant__ Arguments args) {
    constexpr int kQueries = 32 / kLanes / kHeads;
    constexpr int kRepeats = (kD + kVector * kLanes - 1) / (kVector * kLanes);
    typedef Vector<TValue, kVector> Channels;
    typedef SampleBoard<kLanes> Board;
    __shared__ Level levels[kMaxLevels];
    __shared__ Board boards[kWarps];
    extern __shared__ int list_space[];

    const BlockIndex block = block_index<kHeads>(args);
    load_levels(args, block.n, levels);
    __syncthreads();

    const int warp = threadIdx.x / 32, group = threadIdx.x % 32 / kLanes, lane = threadIdx.x % kLanes;
    const int m = block.m + group % kHeads;
    const int64 first_row = static_cast<int64>(block.n) * args.S * args.M + m;
    const TValue* value = static_cast<const TValue*>(args.value) + first_row * kD + lane * kVector;
    Board& board = boards[warp];
    const int num_points = args.num_levels * kP;
    int begin = block.chunk * args.chunk, end = args.Lq;
    QueryList list = {nullptr, 0};
    if constexpr (kTiled) {
        list = list_tiles(args, levels, begin, min(begin + args.chunk, args.tiles_x * args.tiles_y), list_space);
        begin = 0;
        end = list.count;
    }
    for (int index = begin + warp * kQueries; index < end; index += kWarps * kQueries) {
        const int own = index + group / kHeads;
        const bool active = own < end;
        const int q = kTiled ? list[active ? own : 0] : active ? own : 0;
        const Query<TLocation, TWeight, kP, kForm, kLanes> query(args, block.n, q, m, active, lane);
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
        TValue* output = static_cast<TValue*>(args.output) + query.row * kD + lane * kVector;
#pragma unroll
        for (int r = 0; r < kRepeats; ++r) {
            if (active && (r * kLanes + lane) * kVector < kD) Channels::store(output + r * kVector * kLanes, sum[r]);
        }
        // a warp has all its queries at once
        if constexpr (!kTiled) break;
    }
}

}  // namespace msda
