/** Every text of the search box. */
export const PALETTE = {
  label: 'Search and go to',
  placeholder: 'A job, an incident, a fleet, a page, an action',
  found: 'Found',
  searching: 'Still searching…',
  none: 'No page, object or action has this name.',
  incomplete: 'No result in the lists that arrived. Some lists could not be loaded.',
  kinds: {
    page: 'page',
    job: (status: string) => `job, ${status}`,
    fleet: 'fleet',
    node: (fleet: string) => `node of ${fleet}`,
    incident: (cause: string) => `incident, ${cause}`,
    action: 'action',
  },
  actions: {
    pause: (job: string) => `Pause ${job}`,
    resume: (job: string) => `Resume ${job}`,
    stop: (job: string) => `Stop ${job}…`,
    drain: (node: string) => `Drain ${node}…`,
    theme: { light: 'Theme: light', dark: 'Theme: dark', auto: 'Theme: as the system' },
    keys: 'Show keyboard shortcuts',
    signOut: 'Sign out',
  },
} as const
