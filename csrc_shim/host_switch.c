/* SPDX-License-Identifier: Apache-2.0
 *
 * The context switch between fibers: callee-saved registers, and both floating-point control words. Signal masks are
 * left alone, so that no switch costs a system call.
 */
#include <stdlib.h>

#include "host_internal.h"

#if defined(__x86_64__)
__asm__(".text\n"
        ".p2align 4\n"
        ".hidden fc_switch\n"
        ".globl fc_switch\n"
        ".type fc_switch,@function\n"
        "fc_switch:\n"
        "    endbr64\n"
        "    pushq %rbp\n"
        "    pushq %rbx\n"
        "    pushq %r12\n"
        "    pushq %r13\n"
        "    pushq %r14\n"
        "    pushq %r15\n"
        "    subq $8, %rsp\n"
        "    stmxcsr (%rsp)\n"
        "    fnstcw 4(%rsp)\n"
        "    movq %rsp, (%rdi)\n"
        "    movq %rsi, %rsp\n"
        "    ldmxcsr (%rsp)\n"
        "    fldcw 4(%rsp)\n"
        "    addq $8, %rsp\n"
        "    popq %r15\n"
        "    popq %r14\n"
        "    popq %r13\n"
        "    popq %r12\n"
        "    popq %rbx\n"
        "    popq %rbp\n"
        "    ret\n"
        ".size fc_switch,.-fc_switch\n"
        ".p2align 4\n"
        ".hidden fc_fiber_entry\n"
        ".globl fc_fiber_entry\n"
        ".type fc_fiber_entry,@function\n"
        "fc_fiber_entry:\n" /* the fiber is in r12: see prepare_stack */
        "    .cfi_startproc\n"
        "    .cfi_undefined rip\n"
        "    movq %r12, %rdi\n"
        "    call fc_fiber_main\n"
        "    ud2\n"
        "    .cfi_endproc\n"
        ".size fc_fiber_entry,.-fc_fiber_entry\n");
#else
void fc_switch(void **save, void *load) { /* never called: the host target says that it needs x86-64 */
    (void)save, (void)load;
    abort();
}

void fc_fiber_entry(void) {
    abort();
}
#endif
