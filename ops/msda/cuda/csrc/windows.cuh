// The part of each level that a block of scatter32.cuh keeps in shared memory: where its samples are.

#pragma once

#include "inputs.cuh"
#include "queries.cuh"

namespace msda {

struct Moments {
    float count, x, y, xx, yy;  // of the samples on the map
};

constexpr int kMaxSlots = 32;  // of 4 points each
constexpr int kSampling = 8;   // one query in so many is looked at

// Partial sums a warp and slot of 4 points, in an order that does not depend on timing. 8 lanes a query; the warps
// share the pairs of slots.
template <typename TLocation, typename TWeight, int kForm, int kP, int kWarps>
__device__ __forceinline__ void collect_moments(
    const Arguments& args, const BlockIndex& block, const Level* levels, const QueryList& list, Moments* partials
) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 8, octet = threadIdx.x % 32 / 8;
    const int num_points = args.num_levels * kP, num_pairs = (num_points + 7) / 8;
    const int num_shares = max(kWarps / num_pairs, 1);
    const int seen = (list.count + kSampling - 1) / kSampling;
    for (int task = warp; task < num_pairs * num_shares; task += kWarps) {
        const int pair = task % num_pairs, share = task / num_pairs;
        const int j = pair * 8 + lane;
        const int level_index = min(j, num_points - 1) / kP;
        const Level level = levels[level_index];
        Moments sum = {};
        // two at a time, so that they wait for memory together
        for (int base = share * 4; base < seen; base += num_shares * 8) {
            Fetched fetched[2];
            int q[2];
            bool active[2];
#pragma unroll
            for (int b = 0; b < 2; ++b) {
                const int index = base + b * num_shares * 4 + octet;
                active[b] = index < seen && j < num_points;
                q[b] = list[min(index * kSampling, list.count - 1)];
                const Query<TLocation, TWeight, kP, kForm, 8> query(args, block.n, q[b], block.m, true);
                fetched[b] = query.fetch(j, active[b]);
            }
#pragma unroll
            for (int b = 0; b < 2; ++b) {
                const Query<TLocation, TWeight, kP, kForm, 8> query(args, block.n, q[b], block.m, true);
                const Sample sample = query.sample(fetched[b], level_index, level);
                if (active[b] && sample.valid != 0) {
                    const float x = sample.x0, y = sample.y0;
                    sum.count += 1.f;
                    sum.x += x;
                    sum.y += y;
                    sum.xx = fmaf(x, x, sum.xx);
                    sum.yy = fmaf(y, y, sum.yy);
                }
            }
        }
        __syncwarp();
#pragma unroll
        for (int step = 1; step < 32; step *= 2) {
            if (step == 4) continue;
            sum.count += __shfl_xor_sync(kFullWarp, sum.count, step);
            sum.x += __shfl_xor_sync(kFullWarp, sum.x, step);
            sum.y += __shfl_xor_sync(kFullWarp, sum.y, step);
            sum.xx += __shfl_xor_sync(kFullWarp, sum.xx, step);
            sum.yy += __shfl_xor_sync(kFullWarp, sum.yy, step);
        }
        if (threadIdx.x % 32 == 0 || threadIdx.x % 32 == 4) {
            partials[share * kMaxSlots + pair * 2 + threadIdx.x % 32 / 4] = sum;
        }
    }
}

// thread `l` sums what concerns level `l`
template <int kP, int kWarps>
__device__ __forceinline__ Moments level_moments(const Arguments& args, const Moments* partials, int l) {
    const int num_pairs = (args.num_levels * kP + 7) / 8, num_shares = max(kWarps / num_pairs, 1);
    Moments total = {};
    for (int slot = l * kP / 4; slot < (l + 1) * kP / 4; ++slot) {
        for (int share = 0; share < num_shares; ++share) {
            const Moments part = partials[share * kMaxSlots + slot];
            total.count += part.count;
            total.x += part.x;
            total.y += part.y;
            total.xx += part.xx;
            total.yy += part.yy;
        }
    }
    return total;
}

struct Window {
    int x, y, width, height, base;  // `base`: cells of the windows before it; a width of 0 keeps nothing
};

// where `deviations` standard deviations around the mean of the samples lie
__device__ __forceinline__ Window desired_window(const Moments& moments, const Level& level, float deviations) {
    Window window = {0, 0, 0, 0, 0};
    if (moments.count == 0.f) return window;
    const float scale = 1.f / moments.count;
    const float x = moments.x * scale + 0.5f, y = moments.y * scale + 0.5f;
    const float mean_x = x - 0.5f, mean_y = y - 0.5f;
    const float half_x = deviations * sqrtf(fmaxf(moments.xx * scale - mean_x * mean_x, 0.f)) + 1.f;
    const float half_y = deviations * sqrtf(fmaxf(moments.yy * scale - mean_y * mean_y, 0.f)) + 1.f;
    window.x = max(static_cast<int>(floorf(x - half_x)), 0);
    window.y = max(static_cast<int>(floorf(y - half_y)), 0);
    window.width = min(static_cast<int>(ceilf(x + half_x)) + 1, level.W) - window.x;
    window.height = min(static_cast<int>(ceilf(y + half_y)) + 1, level.H) - window.y;
    if (window.width <= 0 || window.height <= 0) window.width = window.height = 0;
    return window;
}

constexpr int kAttempts = 5;

// what each attempt would like of one level: thread `attempt * kMaxLevels + level`
__device__ __forceinline__ void desire_windows(
    const Arguments& args, const Level* levels, const Moments* moments, Window (&attempted)[kAttempts][kMaxLevels]
) {
    for (int i = threadIdx.x; i < kAttempts * kMaxLevels; i += blockDim.x) {
        const int attempt = i / kMaxLevels, l = i % kMaxLevels;
        if (l >= args.num_levels) continue;
        const float deviations = attempt == 0 ? 3.2f : attempt == 1 ? 2.7f : attempt == 3 ? 2.f : 2.3f;
        attempted[attempt][l] = desired_window(moments[l], levels[l], deviations);
    }
}

// Attempts 0 to 3 try ever narrower windows; the last takes the smallest levels first and leaves out what does not
// fit, or all but its middle rows. A window must be added to more often than it is flushed. Returns the cells of all
// windows.
__device__ __forceinline__ int try_windows(
    const Arguments& args, const Moments* moments, int attempt, Window* windows
) {
    const bool last = attempt == kAttempts - 1;
    int total = 0;
    for (int l = args.num_levels - 1; l >= 0; --l) {
        Window window = windows[l];
        float count = moments[l].count;
        if (last && total + window.width * window.height > args.max_cells) {
            const int height = (args.max_cells - total) / window.width;
            count *= (height - 1.f) / window.height;
            window.y += (window.height - height) / 2;
            window.height = height;
        }
        if (count * (2.f * kSampling) < window.width * window.height) window.width = window.height = 0;
        window.base = total;
        total += window.width * window.height;
        windows[l] = window;
    }
    return total;
}

// where the corners of a sample are in its level's window
struct Place {
    bool is_private;
    int4 cells;
};

__device__ __forceinline__ Place place_in(const Sample& sample, const Level& level, const Window& window) {
    const int left = max(sample.x0, 0) - window.x, top = max(sample.y0, 0) - window.y;
    const int right = min(sample.x0 + 1, level.valid_w - 1) - window.x;
    const int bottom = min(sample.y0 + 1, level.valid_h - 1) - window.y;
    const int top_row = window.base + top * window.width, bottom_row = window.base + bottom * window.width;
    return Place{
        left >= 0 && top >= 0 && right < window.width && bottom < window.height,
        make_int4(top_row + left, top_row + right, bottom_row + left, bottom_row + right)
    };
}

}  // namespace msda
