/* SPDX-License-Identifier: Apache-2.0
 *
 * 16-bit float conversions that x86 code generators call by name and that older libgcc lacks. Round to nearest even;
 * a NaN stays a quiet NaN with its sign and high payload bits.
 *
 * Both 16-bit types travel in the low 16 bits of an SSE register, so they are declared here as the float that fills
 * that register.
 */
#include <string.h>

#include "flycomm_shim.h"

typedef float in_xmm; /* only the low 16 bits count */

static uint32_t bits_of(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

static float float_of(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* Rounding to odd keeps a later rounding to 16 bits exact (both have at least two bits fewer than f32). */
static float double_to_odd_float(double value) {
    float rounded = (float)value;
    if (value != value || (double)rounded == value)
        return rounded;
    uint32_t bits = bits_of(rounded);
    if (bits & 1)
        return rounded;
    int away = (rounded < 0 ? -(double)rounded : (double)rounded) > (value < 0 ? -value : value);
    return float_of(away ? bits - 1 : bits + 1);
}

static uint32_t bfloat_bits(uint32_t bits) {
    if ((bits & 0x7fffffff) > 0x7f800000)
        return (bits >> 16) | 0x40;
    return (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
}

static uint32_t half_bits(uint32_t bits) {
    uint32_t sign = (bits >> 16) & 0x8000, magnitude = bits & 0x7fffffff;
    if (magnitude > 0x7f800000)
        return sign | 0x7e00 | ((magnitude >> 13) & 0x3ff);
    if (magnitude >= 0x477ff000) /* rounds to 65536 or more */
        return sign | 0x7c00;
    if (magnitude >= 0x38800000) /* normal: rebias the exponent by 112 and drop 13 bits */
        return sign | ((magnitude - 0x38000000 + 0xfff + ((magnitude >> 13) & 1)) >> 13);
    if (magnitude < 0x33000000) /* under half of the smallest denormal */
        return sign;
    uint32_t shift = 126 - (magnitude >> 23), mantissa = (magnitude & 0x7fffff) | 0x800000;
    uint32_t kept = mantissa >> shift, lost = mantissa & ((1u << shift) - 1), half = 1u << (shift - 1);
    return sign | (kept + (lost > half || (lost == half && (kept & 1))));
}

static uint32_t half_to_float_bits(uint32_t half) {
    uint32_t sign = (half & 0x8000) << 16, exponent = (half >> 10) & 0x1f, mantissa = half & 0x3ff;
    if (exponent == 0x1f)
        return sign | 0x7f800000 | (mantissa << 13) | (mantissa ? 0x400000 : 0);
    if (exponent)
        return sign | ((exponent + 112) << 23) | (mantissa << 13);
    if (!mantissa)
        return sign;
    uint32_t shift = (uint32_t)__builtin_clz(mantissa) - 21;
    return sign | ((113 - shift) << 23) | (((mantissa << shift) & 0x3ff) << 13);
}

FC_API in_xmm __truncsfbf2(float value);
FC_API in_xmm __truncdfbf2(double value);
FC_API float __extendbfsf2(in_xmm value);
FC_API in_xmm __truncsfhf2(float value);
FC_API in_xmm __truncdfhf2(double value);
FC_API float __extendhfsf2(in_xmm value);
FC_API in_xmm __gnu_f2h_ieee(float value);
FC_API float __gnu_h2f_ieee(in_xmm value);

in_xmm __truncsfbf2(float value) { return float_of(bfloat_bits(bits_of(value))); }
in_xmm __truncdfbf2(double value) { return float_of(bfloat_bits(bits_of(double_to_odd_float(value)))); }
float __extendbfsf2(in_xmm value) { return float_of(bits_of(value) << 16); }
in_xmm __truncsfhf2(float value) { return float_of(half_bits(bits_of(value))); }
in_xmm __truncdfhf2(double value) { return float_of(half_bits(bits_of(double_to_odd_float(value)))); }
float __extendhfsf2(in_xmm value) { return float_of(half_to_float_bits(bits_of(value) & 0xffff)); }
in_xmm __gnu_f2h_ieee(float value) { return __truncsfhf2(value); }
float __gnu_h2f_ieee(in_xmm value) { return __extendhfsf2(value); }
