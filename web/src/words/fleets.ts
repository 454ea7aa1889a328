/** Every text of the pages Fleets and Fleet. */
import { plural } from '../model/format'

export const FLEETS = {
  title: 'Fleets',
  document: (name: string) => `Fleet ${name}, Everstep`,
  verdict: {
    all: (number: number) => `${number === 1 ? 'The fleet is' : `All ${number} fleets are`} active.`,
    complete: 'No fleet waits for instances.',
    frozen: (number: number) =>
      `${plural(number, 'fleet')} ${number === 1 ? 'is' : 'are'} frozen: Everstep ends no instance there.`,
    waiting: (nodes: number) => `Everstep waits for ${plural(nodes, 'instance')}.`,
    deleting: (number: number) => `${plural(number, 'fleet')} ${number === 1 ? 'is' : 'are'} being deleted.`,
  },
  empty: { title: 'No fleet yet', text: 'A fleet is an Auto Scaling group that Everstep manages.' },
  differences: (number: number) => `${plural(number, 'difference')} from the required settings.`,
  unknown: 'unknown',
  perHour: (price: string) => `${price}/h`,
  columns: {
    fleet: 'Fleet',
    status: 'Status',
    reason: 'Reason',
    nodes: 'Connected / nodes / desired',
    spares: 'Spares',
    type: 'Instance type',
    zone: 'Zone',
    price: 'Price now',
  },
} as const

export const FLEET = {
  notFound: (name: string) => ({ title: 'Fleet not found', text: `No fleet has the name ${name}.` }),
  verdict: {
    waiting: (nodes: number) => `The fleet waits for ${plural(nodes, 'instance')}.`,
    good: 'All desired nodes are connected.',
    deleting: 'Everstep deletes the fleet.',
  },
  drift: {
    title: 'The Auto Scaling group has wrong settings',
    text: 'Everstep ends no instance until these settings are corrected:',
  },
  unfreeze: {
    verb: 'Unfreeze',
    cause:
      'Everstep acts on nothing because most nodes of the fleet are silent. By this you confirm that the silent ' +
      'nodes have failed. Everstep then recovers their jobs on other nodes and ends their instances.',
    limit: 'The confirmation is valid until most nodes report again. A fleet with wrong settings stays frozen.',
  },
  attention: {
    title: 'Needs attention',
    exposed: 'Jobs can read the agent’s files.',
  },
  facts: 'Settings and figures',
  labels: {
    nodes: 'Nodes',
    connected: 'Connected',
    spares: 'Spares',
    least: 'Nodes kept when idle',
    group: 'Auto Scaling group',
    instances: 'Instances',
    oldestImage: 'Oldest image created',
    price: 'Price',
    cost: 'Cost of its jobs',
    ettr: 'Useful time of its jobs (ETTR)',
    mttr: 'Mean time to recovery',
    incidents: 'Incidents',
    lost: 'Lost nodes',
    failed: 'Failed instances',
    drills: 'Drills',
    encryption: 'Replica encryption (TLS)',
    roll: 'Roll',
    created: 'Created',
  },
  ofDesired: (nodes: string, desired: string, limit: string) => `${nodes} of ${desired} desired, at most ${limit}`,
  zone: (type: string, zone: string) => `${type || 'unknown type'}, ${zone || 'unknown zone'}`,
  prices: (node: string, now: string) => `${node}/h per node, ${now}/h now`,
  roll: (status: string, finished: number, nodes: number, reason: string) =>
    `${status}, ${finished} of ${plural(nodes, 'node')}${reason && `: ${reason}`}`,
  keptForInspection: 'kept for inspection',
  ended: 'ended',
  /** `setting`: Auto, On or Off. `isInForce`: whether a launch now uses TLS. */
  encryption: (setting: string, isInForce: boolean) => {
    const hardware = setting === 'Auto' && !isInForce ? ': EC2 encrypts the traffic' : ''
    return `${setting}, ${isInForce ? 'in force' : `not in force${hardware}`}`
  },
  allowed: 'allowed',
  notAllowed: 'not allowed',
  change: {
    button: 'Change',
    failed: 'The change failed',
    policy: (spares: string) => `A number replaces the present policy: ${spares}.`,
  },
  nodes: {
    title: 'Nodes',
    withEnded: 'Show ended nodes',
    none: 'No node yet.',
    more: (next: string, all: string) => `Show ${next} more of ${all}`,
    columns: {
      node: 'Node',
      status: 'Status',
      agent: 'Agent',
      job: 'Job',
      reason: 'Reason',
      address: 'Address',
      network: 'Network node',
      memory: 'Memory',
      since: 'Since',
      act: 'Actions',
    },
    created: ', created',
    warm: 'connected, warm',
    refused: (messages: string, sessions: string) => `${messages} messages, ${sessions} sessions refused`,
    exposed: 'exposed to jobs',
    act: 'Act…',
    actOn: (id: string) => `Act on ${id}`,
  },
  events: 'Events',
} as const
