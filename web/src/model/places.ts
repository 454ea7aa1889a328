/** The pages of the navigation: their paths, the key that opens each after `g`, and their icons. */
export const PLACES = [
  { name: 'overview', to: '/', key: 'o', path: 'M2.5 8.5L8 3l5.5 5.5M4 7.5v6h8v-6' },
  { name: 'jobs', to: '/jobs', key: 'j', path: 'M2.5 4h11M2.5 8h11M2.5 12h7' },
  {
    name: 'queue',
    to: '/queue',
    key: 'q',
    path: 'M4 2.5h8M4 13.5h8M5 2.5c0 3 6 3 6 5.5s-6 2.5-6 5.5M11 2.5c0 3-6 3-6 5.5s6 2.5 6 5.5',
  },
  { name: 'incidents', to: '/incidents', key: 'i', path: 'M8 2.2L14.4 13.4H1.6zM8 6.6v3M8 11.4v.2' },
  { name: 'fleets', to: '/fleets', key: 'f', path: 'M2.5 3h11v4h-11zM2.5 9h11v4h-11zM5 5h.1M5 11h.1' },
  { name: 'reports', to: '/reports', key: 'r', path: 'M2.5 13.5h11M4 11V8M8 11V3.5M12 11V6' },
  { name: 'drills', to: '/drills', key: 'd', path: 'M9 1.8L3.5 9H8l-1 5.2L12.5 7H8z' },
] as const
export const SUBMIT = { name: 'submit', to: '/submit', key: 's', path: 'M8 3v10M3 8h10' } as const
