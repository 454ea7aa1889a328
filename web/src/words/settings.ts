/** Every text of the sign-in page, of Settings and of the account menu. */
export const SIGN_IN = {
  token: { label: 'Token', text: 'The server exchanges it for a session of at most 12 hours.' },
  button: 'Sign in',
  first: 'The server writes the token of the first administrator into its state directory:',
  local: 'On a local cluster, this command prints the token:',
  failed: 'The sign-in failed',
} as const

export const SETTINGS = {
  title: 'Settings',
  verdict: (role: string, project: string) => ({
    lead: `You are signed in as ${role}.`,
    text: project ? `This session sees the project ${project}.` : 'This session sees all projects.',
  }),
  session: {
    title: 'Session',
    labels: {
      role: 'Permissions',
      project: 'Project',
      token: 'Token',
      ends: 'Session ends',
      server: 'Server',
      agents: 'Agents',
    },
    permissions: {
      admin: 'every operation in every project',
      submitter: 'run and stop jobs of its project, read fleets',
      viewer: 'read',
    } as Record<string, string>,
    otherPermissions: 'as the server permits',
    allProjects: 'all',
    server: (version: string) => `Everstep ${version}`,
  },
  theme: { title: 'Theme', auto: 'As the system', light: 'Light', dark: 'Dark' },
  keys: 'Keyboard shortcuts',
  menu: { settings: 'Settings', signOut: 'Sign out' },
} as const

export const TOKENS = {
  title: 'Tokens',
  withEnded: 'Show ended tokens',
  form: {
    role: 'Role',
    roles: { viewer: 'viewer: reads', submitter: 'submitter: runs jobs', admin: 'admin: every operation' },
    project: 'Project',
    everyProject: 'every project',
    owner: 'Owner or purpose',
    lifetime: 'Lifetime',
    lifetimes: [
      ['30', '30 days'],
      ['7', '7 days'],
      ['1', '1 day'],
      ['365', '1 year'],
      ['', 'until revoked'],
    ] as const,
    create: 'Create token',
    failed: 'The token was not created',
  },
  secret: {
    label: 'The new token',
    text: 'The token is shown only once. Copy it now: the server stores only its digest.',
    done: 'Done',
  },
  columns: {
    token: 'Token',
    role: 'Role',
    scope: 'Scope',
    owner: 'Owner or purpose',
    created: 'Created',
    ends: 'Expires',
    action: 'Action',
  },
  joins: 'joins nodes',
  fleet: (name: string) => `fleet ${name}`,
  own: (owner: string) => `${owner} (this session)`,
  revoked: 'revoked',
  expired: 'expired',
  never: 'never',
  revoke: 'Revoke',
  revokeToken: (id: string) => `Revoke ${id}`,
  effect:
    'The server refuses the token from now on, also in browsers that signed in with it. Nodes that have joined stay.',
  ownEffect: 'You are signed in with this token, so this session ends too.',
} as const
