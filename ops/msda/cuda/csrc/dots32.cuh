// Gradients of locations and weights for D = 32: dots of grad_output with the four corners of every sample.
//
// 16-bit dtypes multiply on the tensor cores, float32 in registers. Rows of neighbouring heads are loaded together,
// as in forward.cuh. The value gradient is scatter32.cuh: the two do not overlap when fused, since both are bound by
// the same load-store pipe, and apart each has the launch shape it wants.

#pragma once

#include "gradients.cuh"
#include "queries.cuh"

namespace msda {

__device__ __forceinline__ void multiply_accumulate(
    float (&c)[4], unsigned a0, unsigned a1, unsigned a2, unsigned a3, unsigned b0, unsigned b1, __nv_bfloat16
) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
__device__ __forceinline__ void multiply_accumulate(
    float (&c)[4], unsigned a0, unsigned a1, unsigned a2, unsigned a3, unsigned b0, unsigned b1, __half
) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// Dots of a batch of points, `kLanes` of them; one point's result a lane.
template <typename T>
struct Dots;

// Tensor cores: the corner rows of 8 (query, head) groups are the rows of A, their grad_output rows the columns of B,
// and only the diagonal is of use. Turning the columns by two groups a point puts each point's diagonal on another
// lane, so the 4 lanes of a group end up with one point each, without a shuffle.
template <typename T>
struct TensorDots {
    static constexpr int kLanes = 4;
    uint4 columns[4];

    static __device__ __forceinline__ int own_point() {
        const int group = threadIdx.x % 32 / 4, lane = threadIdx.x % 4;
        return (lane - group / 2) & 3;
    }

    // `row`: this group's row of grad_output, or null past the last query
    __device__ __forceinline__ void load(const T* row) {
        const int group = threadIdx.x % 32 / 4, lane = threadIdx.x % 4;
        uint4 own = make_uint4(0, 0, 0, 0);
        if (row != nullptr) own = __ldg(reinterpret_cast<const uint4*>(row) + lane);
#pragma unroll
        for (int turn = 0; turn < 4; ++turn) {
            const int source = ((group - 2 * turn) & 7) * 4 + lane;
            columns[turn].x = __shfl_sync(kFullWarp, own.x, source);
            columns[turn].y = __shfl_sync(kFullWarp, own.y, source);
            columns[turn].z = __shfl_sync(kFullWarp, own.z, source);
            columns[turn].w = __shfl_sync(kFullWarp, own.w, source);
        }
    }

    __device__ __forceinline__ void dots(const T* value, const SampleBoard<4>& board, float (&own)[4]) const {
        const int group = threadIdx.x % 32 / 4;
        const bool odd = group & 1;
        const int mine = own_point();
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int4 rows4 = board.rows[SampleBoard<4>::slot(i, group)];
            const int rows[4] = {rows4.x, rows4.y, rows4.z, rows4.w};
            uint4 corners[4];
#pragma unroll
            for (int k = 0; k < 4; ++k) {
                corners[k] = __ldg(reinterpret_cast<const uint4*>(row_pointer<kRow>(value, rows[k])));
            }
#pragma unroll
            for (int k = 0; k < 4; k += 2) {
                float c[4] = {};
                const uint4 a = corners[k], b = corners[k + 1], column = columns[i];
                multiply_accumulate(c, a.x, b.x, a.y, b.y, column.x, column.y, T());
                multiply_accumulate(c, a.z, b.z, a.w, b.w, column.z, column.w, T());
                if (mine == i) {
                    own[k] = odd ? c[1] : c[0];
                    own[k + 1] = odd ? c[3] : c[2];
                }
            }
        }
    }
};

template <>
struct Dots<__half> : TensorDots<__half> {};
template <>
struct Dots<__nv_bfloat16> : TensorDots<__nv_bfloat16> {};

// float32: 8 lanes a group, 4 channels a lane
template <>
struct Dots<float> {
    static constexpr int kLanes = 8;
    float4 column;

    static __device__ __forceinline__ int own_point() { return threadIdx.x % 8; }

    __device__ __forceinline__ void load(const float* row) {
        column = make_float4(0.f, 0.f, 0.f, 0.f);
        if (row != nullptr) column = __ldg(reinterpret_cast<const float4*>(row) + threadIdx.x % 8);
    }

    // adds the partner's share of the points that stay and hands over the rest
    template <int kStep>
    static __device__ __forceinline__ void exchange(const float (&low)[4], const float (&high)[4], float (&sum)[4]) {
        const bool upper = threadIdx.x & kStep;
#pragma unroll
        for (int k = 0; k < 4; ++k) {
            const float give = upper ? low[k] : high[k], keep = upper ? high[k] : low[k];
            sum[k] = keep + __shfl_xor_sync(kFullWarp, give, kStep);
        }
    }

    __device__ __forceinline__ void partial(
        const float* value, const SampleBoard<8>& board, int i, float (&dots)[4]
    ) const {
        const int4 rows4 = board.rows[SampleBoard<8>::slot(i, threadIdx.x % 32 / 8)];
        const int rows[4] = {rows4.x, rows4.y, rows4.z, rows4.w};
        float4 corners[4];
#pragma unroll
        for (int k = 0; k < 4; ++k) {
            corners[k] = __ldg(reinterpret_cast<const float4*>(row_pointer<kRow>(value, rows[k])));
        }
#pragma unroll
        for (int k = 0; k < 4; ++k) {
            float dot = corners[k].x * column.x;
            dot = fmaf(corners[k].y, column.y, dot);
            dot = fmaf(corners[k].z, column.z, dot);
            dots[k] = fmaf(corners[k].w, column.w, dot);
        }
    }

    __device__ __forceinline__ void dots(const float* value, const SampleBoard<8>& board, float (&own)[4]) const {
        float quarters[2][4];
#pragma unroll
        for (int odd = 0; odd < 2; ++odd) {
            float halves[2][4];
#pragma unroll
            for (int two = 0; two < 2; ++two) {
                float low[4], high[4];
                partial(value, board, two * 2 + odd, low);
                partial(value, board, 4 + two * 2 + odd, high);
                exchange<4>(low, high, halves[two]);
            }
            exchange<2>(halves[0], halves[1], quarters[odd]);
        }
        exchange<1>(quarters[0], quarters[1], own);
    }
};

template <
    typename TValue, typename TLocation, typename TWeight, int kForm, int kP, int kHeads, int kWarps, int kMinBlocks,
    bool kTiled>
__global__ void __launch_bounds__(kWarps * 32, kMinBlocks) dots32(const __grid_constant__ Arguments args) {
    constexpr int kLanes = Dots<TValue>::kLanes;
    constexpr int kQueries = 32 / kLanes / kHeads;
    typedef SampleBoard<kLanes> Board;
    __shared__ Level levels[kMaxLevels];
    __shared__ Board boards[kWarps];
    extern __shared__ float gradient_space[];

    const BlockIndex block = block_index<kHeads>(args);
    load_levels(args, block.n, levels);
    __syncthreads();

    const int warp = threadIdx.x / 32, group = threadIdx.x % 32 / kLanes, lane = threadIdx.x % kLanes;
    const int m = block.m + group % kHeads;
    Board& board = boards[warp];
    const int num_points = args.num_levels * kP;
    const bool with_reference_points = kForm != 0 && args.grad_reference_points != nullptr;
    const int board_size = (num_points + kLanes - 1) / kLanes * 32 * (with_reference_points ? 3 : 1);
    GradientBoard<kLanes> gradients(gradient_space + warp * board_size, num_points, with_reference_points);

    const int64 first_row = static_cast<int64>(block.n) * args.S * args.M + m;
    const TValue* value = static_cast<const TValue*>(args.value) + first_row * kRow + lane * (16 / sizeof(TValue));
    const int mine = Dots<TValue>::own_point();

    int begin = block.chunk * args.chunk, end = args.Lq;
    QueryList list = {nullptr, 0};
    if constexpr (kTiled) {
        int* list_space = reinterpret_cast<int*>(gradient_space + (kForm == 0 ? 0 : kWarps * board_size));
        list = list_tiles(args, levels, begin, min(begin + args.chunk, args.tiles_x * args.tiles_y), list_space);
        begin = 0;
        end = list.count;
    }
    for (int index = begin + warp * kQueries; index < end; index += kWarps * kQueries) {
        const int own = index + group / kHeads;
        const bool active = own < end;
        const int q = kTiled ? list[active ? own : 0] : active ? own : 0;
        const Query<TLocation, TWeight, kP, kForm, kLanes> query(args, block.n, q, m, active, lane);
        Dots<TValue> engine;
        engine.load(active ? static_cast<const TValue*>(args.grad_output) + query.row * kRow : nullptr);
        float weighted_sum = 0.f;
        Fetched fetched = query.fetch(mine, active && mine < num_points);
        for (int first = 0; first < num_points; first += kLanes) {
            const int j = first + mine;
            const bool present = active && j < num_points;
            const Level level = levels[present ? j / kP : 0];
            Sample sample = outside_sample();
            if (present) sample = query.sample(fetched, j / kP, level);
            fetched = query.fetch(j + kLanes, active && j + kLanes < num_points);
            __syncwarp();
            board.rows[Board::slot(mine, group)] = cell_rows(sample.cells, args.M);
            __syncwarp();
            float dots[4];
            engine.dots(value, board, dots);
            if (present) {
                finish_sample<kForm, kP, kLanes>(args, query, sample, level, j, group, dots, gradients, weighted_sum);
            }
        }
        finish_query<kForm, kP, kLanes>(args, query, levels, group, lane, gradients, weighted_sum);
        // a warp has all its queries at once
        if constexpr (!kTiled) break;
    }
}

}  // namespace msda
