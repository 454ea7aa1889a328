/** Every text about the nodes of a fleet, and about what a person can do with them. */
import type { Node } from '../contract'

export const NODES = {
  actions: {
    drain: {
      verb: 'Drain',
      effect: 'The job moves to another node at an agreed stop and loses no step. Then Everstep holds the node.',
    },
    hold: { verb: 'Hold', effect: 'The node gets no job until a person releases it. No job runs on it now.' },
    replace: {
      verb: 'Replace',
      effect: 'The job leaves the node at an agreed stop. Then Everstep ends the instance and starts another one.',
    },
    reboot: {
      verb: 'Reboot',
      effect: 'The job leaves the node at an agreed stop. Then the node reboots and is usable again.',
    },
    release: { verb: 'Release', effect: 'The node is usable again. Its earlier faults no longer count.' },
    end: {
      verb: 'Terminate',
      effect: 'Everstep terminates the instance for good. Its diagnostic files are already in S3.',
    },
    cancel: { verb: 'Cancel request', effect: 'Everstep drops the pending request and leaves the node as it is.' },
  },
  held: {
    unreachable: 'its agent is silent; Everstep releases it when the agent reports again',
    distrusted: 'its reports are suspicious; a person decides',
    inspection: 'it failed and stays for inspection; a person decides',
    person: 'a person asked for it',
  } satisfies Record<NonNullable<Node['Hold']>, string>,
  heldTitle: (reason: string) => `Held: ${reason}`,
  heldWithoutReason: 'the server gives no reason',
  requested: (action: string) => `Requested: ${action}`,
  noVersion: 'no agent has joined',
  dialog: {
    title: (id: string) => `Act on ${id}`,
    action: 'Action',
    choose: 'Choose an action',
    recommended: (reason: string) => `Recommended. ${reason}`.trim(),
    job: (name: string) => `Job on this node: ${name}`,
    reason: 'Reason',
    reasonText: 'Everstep shows it with the node and in the events.',
  },
} as const
