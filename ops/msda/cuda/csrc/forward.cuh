// MSDA forward: a group of lanes a (query, head), each lane `kVector` channels wide.
//
// Rows of one head all lie in the same part of their 128-byte lines, so loading several of them meets in the banks of
// the L1: one wavefront a row, however short. A warp that takes neighbouring heads together (`kHeads` of them) fills
// the line, and a 64-byte row costs half.

#pragma once

#include "inputs.cuh"

namespace msda {

// A sample in 16 bytes: half the shared-memory traffic, for a dozen instructions more. Pays where 8 lanes and more
// share a sample and the load-store pipe is what is full.
struct CompactSample {
    // row of corner 0; bit 31: the columns differ, bit 30: the rows differ
    static __device__ __forceinline__ int4 pack(const Sample& sample, int M) {
        float weight = sample.weight, fx = sample.fx, fy = sample.fy;
        const bool left = sample.valid & 5, right = sample.valid & 10;
        const bool top = sample.valid & 3, bottom = sample.valid & 12;
        // with one column on the map, both corners are that column and share its weight
        if (!(left && right)) {
            weight *= left ? 1.f - fx : right ? fx : 0.f;
            fx = 0.f;
        }
        if (!(top && bottom)) {
            weight *= top ? 1.f - fy : bottom ? fy : 0.f;
            fy = 0.f;
        }
        const int steps = (left && right ? 0x80000000 : 0) | (top && bottom ? 0x40000000 : 0);
        return make_int4(sample.cells.x * M | steps, __float_as_int(fx), __float_as_int(fy), __float_as_int(weight));
    }

    // `level_stride`: rows from a cell to the one below
    static __device__ __forceinline__ void unpack(
        const int4& packed, int M, int level_stride, int (&rows)[4], float (&weights)[4]
    ) {
        const int dx = packed.x < 0 ? M : 0, dy = packed.x & 0x40000000 ? level_stride : 0;
        rows[0] = packed.x & 0x3fffffff;
        rows[1] = rows[0] + dx;
        rows[2] = rows[0] + dy;
        rows[3] = rows[1] + dy;
        const float weight = __int_as_float(packed.w), fy = __int_as_float(packed.z);
        const float right = weight * __int_as_float(packed.y), left = weight - right;
        weights[2] = left * fy;
        weights[3] = right * fy;
        weights[0] = left - weights[2];
        weights[1] = right - weights[3];
    }
};

template <
    typename TValue, typename TLocation, typename TWeight, int kForm, int kP, int kD, int kVector, int kLanes,
    int kHeads, int kWarps, int kUnroll, int kMinBlocks>
__global__ void __launch_bounds__(kWarps * 32, kMinBlocks) forward(const __grid_constant__ Arguments args) {
    constexpr int kQueries = 32 / kLanes / kHeads;
    constexpr int kRepeats = (kD + kVector * kLanes - 1) / (kVector * kLanes);
    typedef Vector<TValue, kVector> Channels;
    typedef SampleBoard<kLanes> Board;
    // the level of point `first + i` must follow from `i` alone
    constexpr bool kCompact = kLanes >= 8 && (kLanes % kP == 0 || kP % kLanes == 0);
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
        if constexpr (kCompact) {
            board.rows[Board::slot(lane, group)] = CompactSample::pack(sample, args.M);
        } else {
            board.weights[Board::slot(lane, group)] = corner_weights(sample);
            board.rows[Board::slot(lane, group)] = cell_rows(sample.cells, args.M);
        }
        __syncwarp();
#pragma unroll kUnroll
        for (int i = 0; i < kLanes; ++i) {
            const int4 rows4 = board.rows[Board::slot(i, group)];
            float weights[4];
            int rows[4];
            if constexpr (kCompact) {
                const int level_index = min(first / kP + i / kP, args.num_levels - 1);
                CompactSample::unpack(rows4, args.M, levels[level_index].W * args.M, rows, weights);
            } else {
                const float4 weights4 = board.weights[Board::slot(i, group)];
                weights[0] = weights4.x, weights[1] = weights4.y, weights[2] = weights4.z, weights[3] = weights4.w;
                rows[0] = rows4.x, rows[1] = rows4.y, rows[2] = rows4.z, rows[3] = rows4.w;
            }
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
