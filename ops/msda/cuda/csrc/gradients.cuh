// What both backward kernels share: adding to the value gradient, and the gradients of the fused inputs.

#pragma once

#include "inputs.cuh"

namespace msda {

// ---- adding `kVector` neighbouring channels to the value gradient

// two neighbours of a 16-bit dtype
__device__ __forceinline__ void add_pair(__half* pointer, unsigned bits) {
    asm volatile("red.global.add.noftz.f16x2 [%0], %1;" ::"l"(pointer), "r"(bits) : "memory");
}
__device__ __forceinline__ void add_pair(__nv_bfloat16* pointer, unsigned bits) {
#if __CUDA_ARCH__ >= 900
    asm volatile("red.global.add.noftz.bf16x2 [%0], %1;" ::"l"(pointer), "r"(bits) : "memory");
#else
    // before sm_90 there is only a compare-and-swap loop
    atomicAdd(reinterpret_cast<__nv_bfloat162*>(pointer), *reinterpret_cast<__nv_bfloat162*>(&bits));
#endif
}
#if __CUDA_ARCH__ >= 900
__device__ __forceinline__ void add_two_pairs(__half* pointer, unsigned a, unsigned b) {
    asm volatile("red.global.add.noftz.v2.f16x2 [%0], {%1, %2};" ::"l"(pointer), "r"(a), "r"(b) : "memory");
}
__device__ __forceinline__ void add_two_pairs(__nv_bfloat16* pointer, unsigned a, unsigned b) {
    asm volatile("red.global.add.noftz.v2.bf16x2 [%0], {%1, %2};" ::"l"(pointer), "r"(a), "r"(b) : "memory");
}
#endif

#if __CUDA_ARCH__ >= 900
constexpr bool kVectorReductions = true;
__device__ __forceinline__ void add_four(float* pointer, float a, float b, float c, float d) {
    asm volatile("red.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(pointer), "f"(a), "f"(b), "f"(c), "f"(d)
                 : "memory");
}
__device__ __forceinline__ void add_two(float* pointer, float a, float b) {
    asm volatile("red.global.add.v2.f32 [%0], {%1, %2};" ::"l"(pointer), "f"(a), "f"(b) : "memory");
}
#else
constexpr bool kVectorReductions = false;
template <typename T>
__device__ void add_four(T*, float, float, float, float);
template <typename T>
__device__ void add_two(T*, float, float);
template <typename T>
__device__ void add_two_pairs(T*, unsigned, unsigned);
#endif

template <int kVector>
__device__ __forceinline__ void add(float* pointer, const float (&x)[kVector], float) {
    if constexpr (kVectorReductions && kVector % 4 == 0) {
#pragma unroll
        for (int i = 0; i < kVector; i += 4) add_four(pointer + i, x[i], x[i + 1], x[i + 2], x[i + 3]);
    } else if constexpr (kVectorReductions && kVector == 2) {
        add_two(pointer, x[0], x[1]);
    } else {
#pragma unroll
        for (int i = 0; i < kVector; ++i) {
            asm volatile("red.global.add.f32 [%0], %1;" ::"l"(pointer + i), "f"(x[i]) : "memory");
        }
    }
}

// native accumulation of a 16-bit dtype; always in pairs, since hardware has no scalar reduction for bfloat16
template <typename T, int kVector>
__device__ __forceinline__ void add(T* pointer, const float (&x)[kVector], float) {
    if constexpr (kVector == 1) {
        const bool odd = reinterpret_cast<unsigned long long>(pointer) & 2;
        const unsigned bits = odd ? pack(0.f, x[0], T()) : pack(x[0], 0.f, T());
        add_pair(odd ? pointer - 1 : pointer, bits);
    } else if constexpr (kVectorReductions && kVector % 4 == 0) {
#pragma unroll
        for (int i = 0; i < kVector; i += 4) {
            add_two_pairs(pointer + i, pack(x[i], x[i + 1], T()), pack(x[i + 2], x[i + 3], T()));
        }
    } else {
#pragma unroll
        for (int i = 0; i < kVector; i += 2) add_pair(pointer + i, pack(x[i], x[i + 1], T()));
    }
}

// deterministic: 64-bit fixed point, the same sum in any order
template <int kVector>
__device__ __forceinline__ void add(int64* pointer, const float (&x)[kVector], float scale) {
#pragma unroll
    for (int i = 0; i < kVector; ++i) {
        asm volatile("red.global.add.u64 [%0], %1;" ::"l"(pointer + i), "l"(__float2ll_rn(x[i] * scale))
                     : "memory");
    }
}

// ---- gradients of locations and weights

// Gradients of one query's samples, kept in shared memory until all of its points are done.
// The softmax needs the sum over all points, the reference points a sum over the points of a level.
template <int kLanes>
struct GradientBoard {
    float* weights;
    float* x_px;
    float* y_px;

    __device__ __forceinline__ GradientBoard(float* space, int num_points, bool with_reference_points) {
        const int size = (num_points + kLanes - 1) / kLanes * 32;
        weights = space;
        x_px = with_reference_points ? space + size : nullptr;
        y_px = with_reference_points ? space + 2 * size : nullptr;
    }

    static __device__ __forceinline__ int position(int j, int group) {
        return j / kLanes * 32 + group * kLanes + j % kLanes;
    }
};

// one sample's gradients, by the lane that prepared it
template <int kForm, int kP, int kLanes, typename TQuery>
__device__ __forceinline__ void finish_sample(
    const Arguments& args, const TQuery& query, const Sample& sample, const Level& level, int j, int group,
    const float (&dots)[4], GradientBoard<kLanes>& board, float& weighted_sum
) {
    const SampleGradient gradient = sample_gradient(sample, dots);
    query.store_location_gradient(args, j, j / kP, gradient.x_px, gradient.y_px, level);
    if constexpr (kForm == 0) {
        query.store_weight_gradient(args, j, gradient.weight);
    } else {
        const int position = GradientBoard<kLanes>::position(j, group);
        board.weights[position] = gradient.weight;
        if (board.x_px != nullptr) {
            board.x_px[position] = gradient.x_px;
            board.y_px[position] = gradient.y_px;
        }
        weighted_sum = fmaf(sample.weight, gradient.weight, weighted_sum);
    }
}

// softmax and reference points, once all samples of the query are done; every lane of the warp takes part
template <int kForm, int kP, int kLanes, typename TQuery>
__device__ __forceinline__ void finish_query(
    const Arguments& args, const TQuery& query, const Level* levels, int group, int lane,
    const GradientBoard<kLanes>& board, float weighted_sum
) {
    if constexpr (kForm == 0) return;
    const float total = group_sum<kLanes>(weighted_sum);
    __syncwarp();
    if (query.active) {
        for (int j = lane; j < args.num_levels * kP; j += kLanes) {
            const float gradient = board.weights[GradientBoard<kLanes>::position(j, group)];
            query.store_weight_gradient(args, j, query.weight(j) * (gradient - total));
        }
        if (board.x_px != nullptr) {
            for (int l = lane; l < args.num_levels; l += kLanes) {
                float sums[4] = {};
                for (int p = 0; p < kP; ++p) {
                    const int j = l * kP + p, position = GradientBoard<kLanes>::position(j, group);
                    const float x = board.x_px[position] * levels[l].W, y = board.y_px[position] * levels[l].H;
                    sums[0] += x;
                    sums[1] += y;
                    if constexpr (kForm == 4) {
                        sums[2] += x * to_float(query.locations[2 * j]) * (0.5f / kP);
                        sums[3] += y * to_float(query.locations[2 * j + 1]) * (0.5f / kP);
                    }
                }
                float* output = args.grad_reference_points + (query.row * args.num_levels + l) * kForm;
                for (int i = 0; i < kForm; ++i) output[i] = sums[i];
            }
        }
    }
    __syncwarp();
}

}  // namespace msda
