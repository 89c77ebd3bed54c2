// MSDA backward for any D: a group of lanes a (query, head), value gradients straight to global memory.

#pragma once

#include "gradients.cuh"

namespace msda {

template <
    typename TValue, typename TSum, typename TLocation, typename TWeight, int kForm, int kP, int kD, int kVector,
    int kLanes, int kWarps, int kUnroll, int kMinBlocks>
__global__ void __launch_bounds__(kWarps * 32, kMinBlocks) backward(const __grid_constant__ Arguments args) {
    constexpr int kQueries = 32 / kLanes;
    constexpr int kRepeats = (kD + kVector * kLanes - 1) / (kVector * kLanes);
    typedef Vector<TValue, kVector> Channels;
    typedef SampleBoard<kLanes> Board;
    __shared__ Level levels[kMaxLevels];
    __shared__ Board boards[kWarps];
    extern __shared__ float gradient_space[];

    const BlockIndex block = block_index<1>(args);
    load_levels(args, block.n, levels);
    __syncthreads();

    const int warp = threadIdx.x / 32, group = threadIdx.x % 32 / kLanes, lane = threadIdx.x % kLanes;
    const int q = block.chunk * args.chunk + warp * kQueries + group;
    const Query<TLocation, TWeight, kP, kForm, kLanes> query(args, block.n, min(q, args.Lq - 1), block.m, q < args.Lq, lane);
    Board& board = boards[warp];
    const int num_points = args.num_levels * kP;
    const bool with_reference_points = kForm != 0 && args.grad_reference_points != nullptr;
    const int board_size = (num_points + kLanes - 1) / kLanes * 32 * (with_reference_points ? 3 : 1);
    GradientBoard<kLanes> gradients(gradient_space + warp * board_size, num_points, with_reference_points);

    const int64 cell_stride = static_cast<int64>(args.M) * kD;
    const int64 first_channel =
        static_cast<int64>(block.n) * args.S * cell_stride + block.m * kD + lane * kVector;
    const TValue* value = static_cast<const TValue*>(args.value) + first_channel;
    TSum* grad_value = args.grad_value == nullptr ? nullptr : static_cast<TSum*>(args.grad_value) + first_channel;
    const bool with_dots =
        args.grad_locations != nullptr || args.grad_weights != nullptr || with_reference_points;
    const float scale = args.scales == nullptr ? 0.f : args.scales[0];

    float grad_output[kRepeats][kVector] = {};
    if (query.active) {
        const TValue* grad = static_cast<const TValue*>(args.grad_output) + query.row * kD + lane * kVector;
#pragma unroll
        for (int r = 0; r < kRepeats; ++r) {
            if ((r * kLanes + lane) * kVector < kD) Channels::load(grad + r * kVector * kLanes, grad_output[r]);
        }
    }

    float weighted_sum = 0.f;
    Fetched fetched = query.fetch(lane, query.active && lane < num_points);
    for (int first = 0; first < num_points; first += kLanes) {
        const int j = first + lane;
        const bool present = query.active && j < num_points;
        const Level level = levels[present ? j / kP : 0];
        Sample sample = outside_sample();
        if (present) sample = query.sample(fetched, j / kP, level);
        fetched = query.fetch(j + kLanes, query.active && j + kLanes < num_points);
        __syncwarp();
        board.weights[Board::slot(lane, group)] = corner_weights(sample);
        board.rows[Board::slot(lane, group)] = cell_rows(sample.cells, args.M);
        __syncwarp();
        float own_dots[4] = {};
#pragma unroll kUnroll
        for (int i = 0; i < kLanes; ++i) {
            const float4 weights4 = board.weights[Board::slot(i, group)];
            const int4 rows4 = board.rows[Board::slot(i, group)];
            const float weights[4] = {weights4.x, weights4.y, weights4.z, weights4.w};
            const int rows[4] = {rows4.x, rows4.y, rows4.z, rows4.w};
            if (with_dots) {
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
                    float dot = 0.f;
#pragma unroll
                    for (int r = 0; r < kRepeats; ++r) {
                        float x[kVector];
                        Channels::convert(corners[k][r], x);
#pragma unroll
                        for (int c = 0; c < kVector; ++c) dot = fmaf(grad_output[r][c], x[c], dot);
                    }
                    dot = group_sum<kLanes>(dot);
                    if (lane == i) own_dots[k] = dot;
                }
            }
            if (grad_value != nullptr) {
#pragma unroll
                for (int k = 0; k < 4; ++k) {
                    if (weights[k] == 0.f) continue;
                    TSum* row = row_pointer<kD>(grad_value, rows[k]);
#pragma unroll
                    for (int r = 0; r < kRepeats; ++r) {
                        const bool inside = (r + 1) * kVector * kLanes <= kD || (r * kLanes + lane) * kVector < kD;
                        if (!inside) continue;
                        float x[kVector];
#pragma unroll
                        for (int c = 0; c < kVector; ++c) x[c] = weights[k] * grad_output[r][c];
                        add(row + r * kVector * kLanes, x, scale);
                    }
                }
            }
        }
        if (with_dots && present) {
            finish_sample<kForm, kP, kLanes>(
                args, query, sample, level, j, group, own_dots, gradients, weighted_sum
            );
        }
    }
    if (with_dots) finish_query<kForm, kP, kLanes>(args, query, levels, group, lane, gradients, weighted_sum);
}

}  // namespace msda
