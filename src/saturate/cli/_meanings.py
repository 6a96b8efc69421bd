"""What the words mean that `fit`, `drill`, the trials of a study and the readers of traces print: the cause, and what to do."""

from __future__ import annotations

FIT_VERDICTS = {
    "fits": "A batch was proved: in a fresh process it trained within the limit, with some room to spare. Give the script that size.",
    "nothing_fits": "No size that was tried stays below the limit, often not even a batch of 1, because the memory held between steps alone is "
                    "too much. Give a larger --memory, or try saturate tune --fit LIMIT: some techniques need less.",
    "refused": "There is nothing to search; the reason says why the size of the batch could not be set from outside. If the script has "
               "an argument for it, name that: --knob=--batch-size.",
    "inconclusive": "No size was proved: the budget ended, the script ended, or every size failed its proof. Do not rely on a size that was only "
                    "measured. A longer --budget, or a longer run of the script, would decide.",
}

FIT_SIZES = {
    "fits": "It ran within the limit, with some room to spare.",
    "too_close": "It ran within the limit, but with too little room to spare: another step may need more. A smaller size is tried.",
    "out_of_memory": "It needed more memory than the limit. A smaller size is tried.",
    "allocator_retries": "It ran, but the device's allocator had to free its cache to go on, which costs time in each step. A smaller "
                         "size is tried.",
    "failed": "It ended for another reason than memory. The reason is beside it, and the log of the process is kept.",
    "out_of_time": "The budget ended before it had run long enough. A longer --budget tries it.",
}

DRILL_OUTCOMES = {
    "resumes_exactly": "After the kill it trained on the same batches, with the same losses, as without it. There is nothing to do.",
    "resumes_reordered": "Every sample of the epoch came once, but in another order than without the kill. Save and restore the random "
                         "states, or seed the sampler by epoch.",
    "inconclusive": "Whether it resumes could not be told, and the reason says why. A longer drill may tell: --steps N, --budget TIME.",
    "no_checkpoint": "Nothing had been saved when it was killed. Save earlier or more often, or drill longer: --steps N, --budget TIME.",
    "ends_early": "Restarted, it ended before the uninterrupted run would have. Count what is left to do from the checkpoint's own "
                  "step, not from that of the process.",
    "state_not_restored": "It resumed at the right place, but with other parameters, or another state of the optimizer, the scheduler or the "
                          "random generators. Save and load all of them.",
    "skips_data": "Data that were never used were left out after it was resumed. Save the loader's position together with the update "
                  "that it belongs to.",
    "repeats_data": "Data of the epoch that were used before the checkpoint came again. Save and restore the loader's state, or skip what "
                    "was used.",
    "starts_over": "It began at the first update again: nothing was resumed. Make the script load its newest checkpoint, or name the "
                   "argument that makes it do so: --resume-args.",
    "cannot_load": "It failed when it was restarted. The end of its traceback is in the record; often a checkpoint was only half written when it "
                   "was killed: write to a temporary file and rename it.",
}

TRIAL_OUTCOMES = {
    "ok": "The trial saw enough, and saturate stopped it. There is nothing to do.",
    "too_short": "The command ended normally before enough steps were seen. Give it more steps or epochs for the study.",
    "never_trained": "The command ended normally without one training step. Check that its arguments make it train.",
    "no_step": "It trains, but what repeats could not be recognised as a step. Say what ends one: --step backward:N or --step optimizer:N. A "
               "script that replays a CUDA graph of whole steps must be run without.",
    "not_in_time": "When the budget ended, it had not reached its first step, or with a technique not the point where it is measured. A longer "
                   "--budget waits for it.",
    "several_trainings": "Several of its processes train independently of each other. Give saturate the command of one of them.",
    "ranks_apart": "Some of its ranks came to the end of a step, and others did not: they run on another node, do not train, have no batch left "
                   "(torch's Join), or wait for something. The reason names them. Several nodes and Join are not supported.",
    "no_agent": "saturate's code was never loaded inside the command: that starts another interpreter, or one that keeps it out (python -S or "
                "-I). Start the training with plain python.",
    "crashed": "A Python exception ended it. The reason quotes it, and the log has the whole traceback.",
    "command_not_found": "The command does not exist or cannot be executed. Check its name and path.",
    "out_of_memory_device": "The accelerator's memory was not enough. Lower the batch size or close other programs on this device.",
    "out_of_memory_host": "The machine's memory was not enough: an allocation failed, or the kernel killed the process. Lower the batch "
                          "size or the number of loader workers, or free memory.",
    "shared_memory_full": "/dev/shm was too small for the loader's workers. Enlarge it (docker run --shm-size=8g) or use fewer workers.",
    "disk_full": "There was no space left where the script writes. Free some, or point --dir at another disk.",
    "hung": "It made no progress for too long, and did not end. Look at what it waits for; if a step really takes that long, give a longer "
            "--timeout.",
    "killed_by_signal": "A signal ended it. One that a program brings upon itself (SIGSEGV, SIGABRT) points at native code; any other was "
                        "sent from outside.",
    "supervisor_died": "The process that watches the command was killed. A command must not kill its parent process; if it does not, memory "
                       "may have run out.",
    "exited": "It ended with an exit code of its own. The end of its log says why.",
    "cage_refused": "The isolation of trials could not be set up. saturate doctor says what this machine allows.",
    "not_started": "Something that a trial needs before its command starts was missing: its folder, its standard input, permission to start another "
                   "process. The reason names it.",
    "refused_by_isolation": "The isolation of trials refused something that the command may otherwise do (writing somewhere, a socket). It is not "
                            "the command's fault; the reason names what was refused and what helps.",
    "agent_failed": "saturate's own code failed inside the command. That is a bug of saturate: please report it with the log.",
    "clock_disagrees": "The clocks of the command and of saturate disagree, because it runs on another machine or changes its time. "
                       "Run saturate where the training runs.",
    "not_applied": "A technique refused to be applied, and the reason says why. It is left out; the others are tried.",
    "failed_to_apply": "A technique raised an exception when it was applied. It is left out; the log has the traceback.",
    "not_active": "A technique was set but did not take effect, so its time says nothing. It is left out.",
    "motif_differs": "With the technique, a step consists of other events than the baseline's, so the two cannot be compared. It is left out; "
                     "where the step was recognised wrongly, --step says what ends one.",
    "trains_otherwise": "In a timed run it did not train as the baseline does. It is left out.",
    "diverged": "In a timed run its parameters became infinite or NaN, and those of the baseline did not. Each run of the script draws its own "
                "seed, so that may be chance: give it a fixed one, or look whether it diverges by itself.",
    "over_limit": "It needs more memory than the limit given with --fit. It is left out; a larger limit would allow it.",
}

TRACE_PROBLEMS = {
    "lost-records": "Launches have no kernel, or more than 1 % of events could not be read, so the device was busier than the trace shows. "
                    "Record fewer steps, or with less detail.",
    "maybe-lost-records": "The profiler says that it may have lost events. Record fewer steps, or with less detail, to be sure.",
    "lost-calls": "More than 1 % of calls have no possible time, so gaps and operators cannot be attributed. Record again.",
    "unmatched-kernels": "Fewer than 95 % of kernels have a launch of their own, so gaps and operators cannot be attributed. Record the CPU's "
                         "activities as well as the device's, from before the first of these kernels was launched.",
    "launched-before-recording": "Kernels were launched before the recording began. They are not lost; the gaps before them are not attributed. "
                                 "A step of warm-up in the profiler's schedule avoids it.",
    "duplicate-ids": "Events share an id with another one, of their process or of another in the file, so what they launched may be attributed "
                     "wrongly or to nothing. Do not join traces of several runs or processes into one file.",
    "zero-durations": "More than 1 % of device events have no duration, so short work may be hidden. A profiler whose clock counts "
                      "nanoseconds avoids it.",
    "negative-durations": "Events end before they start. They are left out, and above 1 % nothing is concluded. Record again.",
    "kernels-before-launch": "More than 1 % of kernels start before the calls that launch them. By a few microseconds, the clocks of device and host "
                             "drift, and there is nothing to do. By more than 10 us they do not agree, so gaps, waits and the parts of a step are "
                             "not known: record again, or with a newer driver.",
    "graph-replay": "Kernels that are replayed from a graph belong to one launch and to no operator. Record without CUDA graphs to attribute "
                    "them.",
    "whole-graphs": "Launches of CUDA graphs are recorded as a whole. Record their nodes to see the kernels: nsys profile --cuda-graph-trace=node.",
    "no-steps": "The trace marks no steps, so shares are of the whole span. Call profiler.step() after each step.",
    "no-accelerator": "No work of an accelerator was recorded, so the analysis is of the CPU's operators. Where there is one, record its "
                      "activities too.",
    "unknown-accelerator": "Calls or operators of a device were recorded, or training ran on one, but its own events were not recorded, or are not "
                           "read. What rests on busy and idle time is not known. Record the accelerator's activities too; where that was asked "
                           "for, end other tools that profile the device, or allow profiling in its driver, container or virtual machine.",
    "unknown-device": "Device events do not say which device they ran on. They are shown as a device of their own.",
    "devices-not-told-apart": "Several processes used devices that each gives the same number, and the file does not say which is which. Record "
                              "each process into its own file.",
    "host-ahead": "The recorded steps are those of the host, which had queued them long before the device came to them. Record more steps, so that the "
    "host has to wait for the device, or call torch.cuda.synchronize() at the end of each; `saturate profile` waits by itself.",
    "work-outside-steps": "Part of the device's work lies outside the steps, and the shares of steps leave it out. Mark it as steps, or judge it "
                          "by the span.",
    "profiler-overhead": "The profiler's own work takes more than 5 % of the window, so the step is slower than without it. Record with less "
                         "detail: without stacks, shapes or memory.",
    "loader-in-thread": "A thread of the script's own reads the DataLoader and hands its batches on. The wait of training for that thread is not "
                        "told apart from other host code, so the share of input is not known. Read the loader in the training thread to see it.",
    "other-steps": "The split of a profile is of steps that took much longer, or shorter, than the steps that were timed. Profile once more on a "
    "quiet machine, or with more --steps where steps differ.",
    "long-steps": "A few of the recorded steps took most of their time, because something happened in them that does not happen in every step (an "
    "evaluation, an episode of play, a compilation). Verdict and findings are mostly of that; step time and split are not. Profile once more, or with "
    "more --steps, so that it has the share of the time that it has in the training.",
    "nothing-measured": "The command ended, or could not be followed, before a step was measured, for the reason that stands with it. Nothing is "
    "said of its time.",
    "uneven-input": "On a CPU, the few recorded steps waited for the loader for another time than those that were clocked without a profiler: "
                    "its batches come in bursts. What is said of input is of the clocked steps; the trace shows the recorded ones.",
    "truncated": "The file ends too early. It was read as far as it goes, and nothing is concluded from it. Let the profiler finish, and copy the "
                 "file whole.",
    "concatenated": "More follows behind the end of the trace, and was not read. Split files that were joined.",
    "damaged-gzip": "The compressed data are damaged, or their checksum is wrong. Copy the file again, or record again.",
    "damaged-events": "Part of the file is no event that can be read, and was passed over. Copy the file again, or record again.",
    "malformed-events": "A few events have no name, no time or values that no event has, and were left out. Nothing is to be done where they are "
                        "few.",
    "malformed-facts": "What the file says of the machine or the run is not what it should be, and was not used. Nothing is to be done.",
    "not-quite-json": "The file holds numbers (nan, inf), escapes or bytes that JSON does not know; they were read as unknown. A newer torch "
                      "writes them rightly.",
    "below-nanoseconds": "Times have more decimals than nanoseconds need, and were rounded. Nothing is to be done.",
    "no-events": "The file holds nothing that torch.profiler records. Check that it is the trace that was meant.",
    "unfinished-write": "Another program has the file open, and what it has not yet written back was not read. Close it, and read again.",
    "not-one-run": "The files cannot be the ranks of one run, so nothing is said of who waited for whom. Give the files of one run only.",
    "ranks": "A note on how far the ranks of one run could be compared, such as clocks that do not agree. The message says what it concerns.",
    "unreadable": "One of several files could not be read, and was left out. The message names it and says why.",
}
