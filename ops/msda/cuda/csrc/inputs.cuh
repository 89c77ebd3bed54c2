// Where a query's samples come from: locations and weights as given, or offsets and logits in the fused form.
//
// kForm 0: sampling locations and attention weights. 2: offsets around points (x, y) and logits.
// 4: offsets in boxes (cx, cy, w, h) and logits.

#pragma once

#include "common.cuh"

namespace msda {

template <int kLanes>
__device__ __forceinline__ float group_sum(float x) {
#pragma unroll
    for (int step = kLanes / 2; step > 0; step /= 2) x += __shfl_xor_sync(kFullWarp, x, step);
    return x;
}

template <int kLanes>
__device__ __forceinline__ float group_max(float x) {
#pragma unroll
    for (int step = kLanes / 2; step > 0; step /= 2) x = fmaxf(x, __shfl_xor_sync(kFullWarp, x, step));
    return x;
}

struct Fetched {
    float x, y, weight;
};

// One head of one query, read by a group of `kLanes` lanes. An inactive one samples nothing.
template <typename TLocation, typename TWeight, int kP, int kForm, int kLanes>
struct Query {
    bool active;
    int64 row;  // of (N, Lq, M)
    const TLocation* locations;
    const TWeight* weights;
    const float* reference_points;
    float max_logit, inverse_sum;

    // without the softmax: logits stand for weights until it is known
    __device__ __forceinline__ Query(const Arguments& args, int n, int q, int m, bool is_active) {
        active = is_active;
        // what does not depend on q apart, in 64 bits: loops over queries keep it
        const int64 image = static_cast<int64>(n) * args.Lq, first_row = image * args.M + m;
        const unsigned step = q * args.M, num_points = args.num_levels * kP;
        row = first_row + step;
        locations = static_cast<const TLocation*>(args.locations) + first_row * num_points * 2 +
                    static_cast<unsigned long long>(step) * (num_points * 2);
        weights = static_cast<const TWeight*>(args.weights) + first_row * num_points +
                  static_cast<unsigned long long>(step) * num_points;
        max_logit = 0.f;
        inverse_sum = 1.f;
        if constexpr (kForm != 0) {
            reference_points = static_cast<const float*>(args.reference_points) +
                               image * args.num_levels * kForm +
                               static_cast<unsigned long long>(static_cast<unsigned>(q)) * (args.num_levels * kForm);
        }
    }

    // every lane of the warp takes part
    __device__ __forceinline__ Query(const Arguments& args, int n, int q, int m, bool is_active, int lane)
        : Query(args, n, q, m, is_active) {
        if constexpr (kForm != 0) {
            const int num_points = args.num_levels * kP;
            const float minus_infinity = __int_as_float(0xff800000);
            float largest = minus_infinity, sum = 0.f;
            if (active) {
                for (int j = lane; j < num_points; j += kLanes) largest = fmaxf(largest, to_float(weights[j]));
            }
            largest = group_max<kLanes>(largest);
            // a query whose logits are all -inf is masked out: its weights are 0
            max_logit = largest == minus_infinity ? 0.f : largest;
            if (active) {
                for (int j = lane; j < num_points; j += kLanes) sum += expf(to_float(weights[j]) - max_logit);
            }
            sum = group_sum<kLanes>(sum);
            inverse_sum = sum == 0.f ? 0.f : 1.f / sum;
        }
    }

    __device__ __forceinline__ float weight_of(float x) const {
        if constexpr (kForm == 0) return x;
        return expf(x - max_logit) * inverse_sum;
    }

    __device__ __forceinline__ float weight(int j) const { return weight_of(to_float(weights[j])); }

    // reads a sample's inputs, early enough that the wait overlaps with other work
    __device__ __forceinline__ Fetched fetch(int j, bool present) const {
        Fetched fetched = {0.f, 0.f, 0.f};
        if (present) {
            float location[2];
            Vector<TLocation, 2>::load(locations + 2 * j, location);
            fetched = Fetched{location[0], location[1], to_float(weights[j])};
        }
        return fetched;
    }

    __device__ __forceinline__ Sample sample(const Fetched& fetched, int level_index, const Level& level) const {
        float x_px, y_px;
        if constexpr (kForm == 0) {
            x_px = fmaf(fetched.x, level.W, -0.5f);
            y_px = fmaf(fetched.y, level.H, -0.5f);
        } else if constexpr (kForm == 2) {
            // reference + offset / W, times W: no division
            const float2 point = reinterpret_cast<const float2*>(reference_points)[level_index];
            x_px = fmaf(point.x, level.W, fetched.x - 0.5f);
            y_px = fmaf(point.y, level.H, fetched.y - 0.5f);
        } else {
            const float4 box = reinterpret_cast<const float4*>(reference_points)[level_index];
            x_px = fmaf(fmaf(fetched.x * (0.5f / kP), box.z, box.x), level.W, -0.5f);
            y_px = fmaf(fmaf(fetched.y * (0.5f / kP), box.w, box.y), level.H, -0.5f);
        }
        return make_sample(x_px, y_px, weight_of(fetched.weight), level);
    }

    // writes the gradient of one location or offset from that of its pixel coordinates
    __device__ __forceinline__ void store_location_gradient(
        const Arguments& args, int j, int level_index, float x_px, float y_px, const Level& level
    ) const {
        if (args.grad_locations == nullptr) return;
        float gradient[2] = {x_px, y_px};
        if constexpr (kForm != 2) {
            gradient[0] *= level.W;
            gradient[1] *= level.H;
        }
        if constexpr (kForm == 4) {
            const float4 box = reinterpret_cast<const float4*>(reference_points)[level_index];
            gradient[0] *= (0.5f / kP) * box.z;
            gradient[1] *= (0.5f / kP) * box.w;
        }
        const int64 index = (row * args.num_levels * kP + j) * 2;
        Vector<TLocation, 2>::store(static_cast<TLocation*>(args.grad_locations) + index, gradient);
    }

    __device__ __forceinline__ void store_weight_gradient(const Arguments& args, int j, float gradient) const {
        if (args.grad_weights == nullptr) return;
        static_cast<TWeight*>(args.grad_weights)[row * args.num_levels * kP + j] = from_float<TWeight>(gradient);
    }
};

// Samples are prepared one a lane and then read by the whole group of their query: this is where they meet.
// The slots are permuted so that neither the 16-byte stores nor the loads meet in a bank.
template <int kLanes>
struct SampleBoard {
    static constexpr int kQueries = 32 / kLanes;
    float4 weights[32];
    int4 rows[32];

    static __device__ __forceinline__ int slot(int i, int query) {
        const int turn = kQueries >= 8 ? i * (8 / kLanes) : i * kQueries / 8;
        return i * kQueries + (query ^ (turn % kQueries));
    }
};

struct BlockIndex {
    int n, m, chunk;
};

// A block takes `kHeads` neighbouring heads of one image and a chunk of the queries. The image is slowest, so that
// the values and gradients in flight stay in the L2.
template <int kHeads>
__device__ __forceinline__ BlockIndex block_index(const Arguments& args) {
    const int head = blockIdx.x / args.num_chunks, heads = args.M / kHeads;
    return BlockIndex{
        head / heads, head % heads * kHeads, static_cast<int>(blockIdx.x) - head * args.num_chunks
    };
}

}  // namespace msda
